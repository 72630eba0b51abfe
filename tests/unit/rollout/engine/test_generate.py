"""The engine for use alone: a checkpoint folder, prompts in every form, answers as text and tool calls."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from model.checkpoint import load_model, save_model
from model.config import Family, KernelChoice, ModelConfig
from model.hf.writer import HfFormat, save_hf
from model.kernels.cpu.isa import available_isas
from model.loaded import CheckpointError
from model.snapshot import publish_tensor, published_view, view
from model.transformer import Transformer, init_weights
from rollout.config import ChatFormat, EngineConfig, EngineConfigError, LoadMode, Precision
from rollout.engine.active import EngineError
from rollout.engine.engine import Engine
from rollout.engine.text import PromptError
from rollout.renderers.codec import RendererError
from rollout.types import FinishReason, Message, Role, SamplingParams, TrajectoryError
from tests.unit.rollout.renderers.vocabulary import renderer_for, tokenizer_for

CONFIG = ModelConfig(
    vocab_size=320, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, expert_hidden_size=32, max_positions=256
)
SMALL = EngineConfig(max_batch_size=4, max_seq_len=512)
TOOLS = ({"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}},)
CHAT = [Message(role=Role.USER, content="hello")]


def masters(config=CONFIG, seed=0):
    model = Transformer(config)
    init_weights(model, seed)
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of ours with chatml's tokenizer."""
    path = tmp_path_factory.mktemp("checkpoint")
    save_model(path, CONFIG, masters(), {})
    tokenizer_for(ChatFormat.chatml).save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def engine(folder):
    return Engine.load(folder, SMALL)


def scripted(engine, monkeypatch, *answers):
    """Make the engine say these ids, one answer a prompt; the rest of it runs."""
    turns = {}

    def choose(sampling, logits):
        chosen = []
        for active in sampling:
            place = turns.setdefault(active.request_id, len(turns))
            chosen.append(answers[place][len(active.logprobs)])
        num = len(sampling)
        return type("Sampled", (), {
            "ids_N": torch.tensor(chosen), "logprobs_N": torch.zeros(num), "model_logprobs_N": torch.zeros(num)
        })  # fmt: skip

    monkeypatch.setattr(engine, "_choose", choose)


def test_a_folder_becomes_an_engine_that_knows_its_chat_format(engine):
    said = engine.generate([CHAT, "the weather", [5, 6, 7]], SamplingParams(max_tokens=6))
    renderer = renderer_for(ChatFormat.chatml)
    assert said[0].prompt_ids == renderer.opening(CHAT).ids
    assert said[1].prompt_ids == tuple(tokenizer_for(ChatFormat.chatml).encode("the weather").ids)
    assert said[2].prompt_ids == (5, 6, 7)
    for one in said:
        assert one.finish is FinishReason.LENGTH or one.ids[-1] in renderer.stop_ids
        assert len(one.logprobs_T) == len(one.model_logprobs_T) == len(one.ids) <= 6
    assert said[1].text == tokenizer_for(ChatFormat.chatml).decode(list(said[1].ids))
    mapping = engine.generate([[{"role": "user", "content": "hello"}]], SamplingParams(max_tokens=6))
    assert mapping[0].ids == said[0].ids
    assert engine.metrics().num_running == 0
    assert engine._scheduler.sessions == {}


def test_the_seed_and_the_place_in_the_call_decide(folder, engine):
    params = SamplingParams(max_tokens=12)
    one, two = engine.generate(["x", "x"], params)
    again = Engine.load(folder, SMALL).generate(["x", "x"], params)
    assert one.ids != two.ids
    assert [one.ids, two.ids] == [each.ids for each in again]
    other = Engine.load(folder, dataclasses.replace(SMALL, seed=1)).generate(["x", "x"], params)
    assert other[0].ids not in (one.ids, two.ids)


def test_tool_calls_are_read_from_the_answer(engine, monkeypatch):
    renderer = renderer_for(ChatFormat.chatml)
    ids = renderer.codec.encode([]) + tuple(
        tokenizer_for(ChatFormat.chatml).encode('<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>').ids
    )
    ids += (min(renderer.stop_ids),)
    scripted(engine, monkeypatch, ids)
    (said,) = engine.generate([CHAT], SamplingParams(max_tokens=100), tools=TOOLS)
    assert said.prompt_ids == renderer.opening(CHAT, TOOLS).ids
    assert said.finish is FinishReason.STOP
    assert said.ids == ids
    assert [(call.name, dict(call.arguments)) for call in said.tool_calls] == [("f", {"x": 1})]


def test_a_stop_string_ends_the_answer_across_tokens_and_is_not_in_the_text(engine, monkeypatch):
    tokenizer = tokenizer_for(ChatFormat.chatml)
    ids = [token for piece in ("fine E", "N", "D and more") for token in tokenizer.encode(piece).ids]
    scripted(engine, monkeypatch, ids, ids)
    params = [SamplingParams(max_tokens=len(ids), stop=("END",)), SamplingParams(max_tokens=len(ids))]
    stopped, whole = engine.generate(["a", "b"], params)
    assert (stopped.text, stopped.finish) == ("fine ", FinishReason.STOP)
    assert tokenizer.decode(list(stopped.ids)) == "fine END"
    assert (whole.text, whole.finish) == ("fine END and more", FinishReason.LENGTH)


def test_stop_ids_of_a_request_end_it(engine, monkeypatch):
    scripted(engine, monkeypatch, [9, 8, 7, 6])
    (said,) = engine.generate(["a"], SamplingParams(max_tokens=4, stop_ids=(7,)))
    assert (said.ids, said.finish) == ((9, 8, 7), FinishReason.STOP)


@pytest.mark.parametrize("precision", Precision)
def test_each_precision_computes_with_its_own_reading(folder, precision):
    engine = Engine.load(folder, dataclasses.replace(SMALL, precision=precision))
    views = engine.running_views()
    for name, master in masters().items():
        published = view(publish_tensor(name, master))
        wanted = {"mxfp4": published, "bf16": master.bfloat16().float(), "fp32": master}[precision]
        assert np.array_equal(views[name], wanted.numpy()), name
    assert engine.batch_invariant == (precision is Precision.mxfp4 and bool(available_isas()))
    assert len(engine.generate(["a"], SamplingParams(max_tokens=3))[0].ids) <= 3


def test_published_bytes_run_as_they_are(folder, tmp_path):
    save_model(tmp_path, CONFIG, published_view(masters()), {})
    from_bytes, from_masters = (Engine.load(each, SMALL) for each in (tmp_path, folder))
    params = SamplingParams(max_tokens=8)
    a, b = (engine.generate([[7, 8, 9]], params)[0] for engine in (from_bytes, from_masters))
    # Without a tokenizer there is no stop token, so only what both have is compared.
    num = min(len(a.ids), len(b.ids))
    assert a.ids[:num] == b.ids[:num]
    assert a.logprobs_T[:num].tobytes() == b.logprobs_T[:num].tobytes()
    assert a.text == ""


def test_a_checkpoint_with_the_bytes_trained_on_runs_those(folder, tmp_path):
    trained_on = published_view({name: master * 1.5 for name, master in masters().items()})
    (tmp_path / "published").mkdir()
    save_model(tmp_path, CONFIG, masters(), {})
    save_model(tmp_path / "published", CONFIG, trained_on, {})
    settings = [{}, {"load": LoadMode.mmap}] if available_isas() else [{}]
    for how in settings:
        views = Engine.load(tmp_path, dataclasses.replace(SMALL, **how)).running_views()
        assert all(np.array_equal(views[name], view(packed).numpy()) for name, packed in trained_on.items())
    unquantized = Engine.load(tmp_path, dataclasses.replace(SMALL, precision=Precision.fp32)).running_views()
    assert all(np.array_equal(unquantized[name], master.numpy()) for name, master in masters().items())


def test_a_published_checkpoint_runs_too(tmp_path):
    config = dataclasses.replace(CONFIG, family=Family.mixtral, router_bias=False)
    (tmp_path / "hf").mkdir()
    save_hf(tmp_path / "hf", config, masters(config).items(), HfFormat.BF16)
    loaded = load_model(tmp_path / "hf")
    engine = Engine.load(tmp_path / "hf", SMALL)
    assert engine.running_views().keys() == loaded.weights.keys()
    assert len(engine.generate([[7, 8, 9]], SamplingParams(max_tokens=5))[0].ids) == 5


# ---- refusals


def test_an_engine_without_a_tokenizer_takes_ids_only(tmp_path):
    save_model(tmp_path, CONFIG, masters(), {})
    engine = Engine.load(tmp_path, SMALL)
    for prompt in ("text", CHAT):
        with pytest.raises(PromptError, match="prompt: text needs a tokenizer, got an engine without one; give token"):
            engine.generate([prompt])
    with pytest.raises(EngineError, match="engine: prompt 0: stop strings need a tokenizer"):
        engine.generate([[1, 2]], SamplingParams(stop=("x",)))
    tokenizer_for(ChatFormat.chatml).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(RendererError, match="must hold each control token of the chat format harmony"):
        Engine.load(tmp_path, SMALL, chat_format=ChatFormat.harmony)


@pytest.mark.parametrize(
    ("prompts", "how", "line"),
    [
        (["a"], {"tools": TOOLS}, "tools: belong to a conversation, got a prompt without messages; give messages"),
        ([[{"role": "human", "content": ""}]], {}, "prompt: a message has a role of system, user, assistant, tool and"),
        (["a", "b"], {"params": [SamplingParams()]}, "params: one for each of 2 prompts, got 1; give one, or as many"),
    ],
    ids=range(3),
)
def test_prompts_that_cannot_be_read_are_one_line(engine, prompts, how, line):
    with pytest.raises(PromptError) as caught:
        engine.generate(prompts, **how)
    assert str(caught.value).startswith(line)


@pytest.mark.parametrize(
    ("settings", "error", "line"),
    [
        ({"tensor_parallel_size": 2}, EngineConfigError, "engine.tensor_parallel_size: an engine runs on one device"),
        (
            {"load": LoadMode.mmap, "kernels": KernelChoice.torch},
            EngineConfigError,
            "engine.load: experts are mapped as MXFP4 for the CPU kernels, got mmap with precision mxfp4 and kernels",
        ),
        (
            {"precision": Precision.bf16, "kernels": KernelChoice.avx2},
            EngineConfigError,
            "engine.kernels: experts in bf16 run in torch only, got avx2; set precision to mxfp4",
        ),
    ],
    ids=range(3),
)
def test_settings_that_cannot_be_carried_out_are_one_line(folder, settings, error, line):
    with pytest.raises(error) as caught:
        Engine.load(folder, dataclasses.replace(SMALL, **settings))
    assert str(caught.value).startswith(line)


def test_a_folder_without_a_checkpoint_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        Engine.load(tmp_path)


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ({"top_k": -1}, "top_k: must not be negative, got -1; use 0 for all tokens"),
        ({"top_p": 0.0}, "top_p: must be above 0 and at most 1, got 0.0; use 1 for all tokens"),
        ({"min_p": 1.5}, "min_p: must lie in 0..1, got 1.5; use 0 for all tokens"),
        ({"stop": ("a", "")}, "stop: a stop string must have text, got an empty one; leave it out"),
        ({"stop": "END"}, "stop: must be a list of texts, got 'END'; put a single one into a list"),
        ({"stop": None}, "stop: must be a list of texts, got None; put a single one into a list"),
        ({"stop": {"a": 1}}, "stop: must be a list of texts, got {'a': 1}; put a single one into a list"),
        ({"stop": ("a", 5)}, "stop: must hold texts only, got 5; leave it out"),
        ({"stop_ids": 7}, "stop_ids: must be a list of token ids (whole numbers), got 7; put a single one into a list"),
        (
            {"stop_ids": "7"},
            "stop_ids: must be a list of token ids (whole numbers), got '7'; put a single one into a list",
        ),
        ({"stop_ids": [7, "8"]}, "stop_ids: must hold token ids (whole numbers) only, got '8'; leave it out"),
        ({"stop_ids": [True]}, "stop_ids: must hold token ids (whole numbers) only, got True; leave it out"),
        ({"stop_ids": [3, -1]}, "stop_ids: must not be negative, got -1; leave it out"),
    ],
    ids=range(13),
)
def test_sampling_parameters_that_make_no_sense_are_one_line(how, line):
    with pytest.raises(TrajectoryError) as caught:
        SamplingParams(**how)
    assert str(caught.value) == line


@pytest.mark.parametrize(
    ("prompts", "line"),
    [
        ([None], "prompts[0]: must be text, token ids or messages, got None; give generate a list of prompts"),
        (["a", 3], "prompts[1]: must be text, token ids or messages, got 3; give generate a list of prompts"),
        ([[1.5]], "prompts[0]: must hold token ids (whole numbers) only, got 1.5; give it all of one kind"),
        ([[1, True]], "prompts[0]: must hold token ids (whole numbers) only, got True; give it all of one kind"),
        ([[1, "a"]], "prompts[0]: must hold token ids (whole numbers) only, got 'a'; give it all of one kind"),
        (
            [[{"role": "user", "content": "a"}, 7]],
            "prompts[0]: must hold messages only, got 7; give it all of one kind",
        ),
        (None, "prompts: must be a list of prompts, got None; put a single one into a list"),
    ],
)
def test_what_is_no_prompt_is_named_in_one_line(engine, prompts, line):
    with pytest.raises(PromptError) as caught:
        engine.generate(prompts)
    assert str(caught.value) == line


TOOL = TOOLS[0]


@pytest.mark.parametrize(
    ("tools", "line"),
    [
        (None, "tools: must be a list of tools, got None; put a single one into a list, or leave it out"),
        ("f", "tools: must be a list of tools, got 'f'; put a single one into a list, or leave it out"),
        (TOOL, f"tools: must be a list of tools, got {TOOL}; put a single one into a list, or leave it out"),
        (
            ["f"],
            "tools[0]: must declare a function by its name, got 'f'; write "
            '{"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}',
        ),
        (
            [TOOL, {"name": "g", "parameters": {}}],
            "tools[1]: must declare a function by its name, got {'name': 'g', 'parameters': {}}; write "
            '{"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}',
        ),
        (
            [{"type": "function", "function": {"name": "g", "parameters": {1, 2}}}],
            "tools[0]: must be what JSON can hold, got Object of type set is not JSON serializable; use lists, texts "
            "and numbers",
        ),
    ],
    ids=range(6),
)
def test_what_is_no_list_of_tools_is_named_in_one_line(engine, tools, line):
    with pytest.raises(PromptError) as caught:
        engine.generate([CHAT], tools=tools)
    assert str(caught.value) == line


def test_stop_ids_may_be_a_list_or_numbers_of_numpy(engine, monkeypatch):
    scripted(engine, monkeypatch, [9, 8, 7, 6], [9, 8, 7, 6])
    params = [SamplingParams(max_tokens=4, stop_ids=given) for given in ([7], (np.int64(7),))]
    assert [one.ids for one in engine.generate(["a", "b"], params)] == [(9, 8, 7)] * 2


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (5, "engine: a checkpoint must be given as a path, got 5; name its folder as a text"),
        (None, "engine: a checkpoint must be given as a path, got None; name its folder as a text"),
        (b"/tmp", "engine: a checkpoint must be given as a path, got b'/tmp'; name its folder as a text"),
        (
            "hf://openai/gpt-oss-20b",
            "engine: a checkpoint is loaded from a folder of this machine, got the URL hf://openai/gpt-oss-20b; "
            "download it, or convert it with python -m model.export, which reads URLs",
        ),
    ],
    ids=range(4),
)
def test_what_is_no_folder_is_named_in_one_line(path, line):
    with pytest.raises(EngineConfigError) as caught:
        Engine.load(path, SMALL)
    assert str(caught.value) == line


def test_a_chat_format_that_is_no_text_is_named(folder):
    given: Any = ["chatml"]
    with pytest.raises(EngineConfigError, match=r"^engine\.chat_format: no such choice, got \['chatml'\]; choose one"):
        Engine.load(folder, SMALL, chat_format=given)


def test_a_string_is_one_prompt(engine):
    params = SamplingParams(max_tokens=3)
    (alone,), (listed,) = engine.generate("hello", params), engine.generate(["hello"], params)
    assert (alone.prompt_ids, alone.ids) == (listed.prompt_ids, listed.ids)


def test_parameters_of_another_type_are_named(engine):
    with pytest.raises(
        PromptError, match=r"^params: must be SamplingParams, got \{'top_k': 3\}; write SamplingParams\("
    ):
        engine.generate(["a"], {"top_k": 3})


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "max_tokens", "top_k"])
@pytest.mark.parametrize("value", ["hot", None, True, [1], float("nan")])
def test_a_sampling_value_that_is_no_number_is_named(name, value):
    with pytest.raises(TrajectoryError, match=rf"^{name}: must .*, got .*; "):
        SamplingParams(**{name: value})


def test_a_config_of_another_type_is_named(folder):
    given: Any = {"max_seq_len": 64}
    with pytest.raises(EngineConfigError) as caught:
        Engine.load(folder, given)
    assert str(caught.value) == (
        "engine.config: must be an EngineConfig, got {'max_seq_len': 64}; write EngineConfig(max_seq_len=...)"
    )


@pytest.mark.parametrize("value", ["64", 1.5, None, True])
def test_a_setting_that_is_no_whole_number_is_named(folder, value):
    with pytest.raises(EngineConfigError) as caught:
        Engine.load(folder, EngineConfig(max_seq_len=value))
    assert str(caught.value) == f"engine.max_seq_len: must be a whole number, got {value!r}; give it without quotes"


def test_a_folder_that_does_not_exist_is_said_to_be_missing(tmp_path):
    with pytest.raises(EngineConfigError) as caught:
        Engine.load(tmp_path / "none", SMALL)
    assert str(caught.value) == (
        f"engine: there is no such folder, got {tmp_path / 'none'}; name the folder that holds its config.json"
    )
