"""The plan's arithmetic by hand on small shapes, its bounds on published ones, and its one-line errors."""

import dataclasses
import subprocess
import sys

import pytest

from model import plan
from model.config import ModelConfig
from model.planning.compose import compose, presets
from model.planning.config import PlanConfig, PlanError, PlanRun
from model.planning.memory import (
    GpuMemory,
    bf16_bits,
    learner_memory,
    longest_context,
    most_sequences,
    sampler_memory,
    stages,
)
from model.planning.table import amount, duration, number, render
from model.planning.transfer import Transfer
from model.size import ModelSize, Part, published_bits

SMALL = ModelConfig(
    vocab_size=64, hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, sliding_window=10,
    window_layers=[1], expert_hidden_size=64, num_experts=8, num_experts_per_tok=2, tie_embeddings=False,
)  # fmt: skip
NORMS, ATTENTION, ROUTER, EXPERTS, TABLE = 2 * 32, 2 * 32 * (32 + 16), 8 * 32, 8 * 3 * 32 * 64, 64 * 32
LAYER = NORMS + ATTENTION + ROUTER


def resolved(model: ModelConfig = SMALL, **values: float) -> tuple[ModelConfig, PlanConfig]:
    run = PlanRun(model=model, plan=PlanConfig(**values)).resolved()  # pyright: ignore[reportArgumentType]
    return run.model, run.plan


def arguments(name: str, *more: str) -> tuple[ModelConfig, PlanConfig]:
    run = compose([f"model={name}", *more]).resolved()
    return run.model, run.plan


def test_alone_a_gpu_holds_the_whole_model():
    model, plan = resolved()
    size = ModelSize.of(model)
    assert sampler_memory(model, plan).parts["weights"] == size.published_bytes
    assert sampler_memory(model, plan, bf16_bits).parts["weights"] == size.bf16_bytes
    learner = learner_memory(model, plan).parts
    held = {name: learner[name] / size.num_total for name in learner if name != "activations"}
    assert held == {"fp32 masters": 4, "published view": 2, "gradients": 4, "optimizer": 12}


def test_the_fullest_stage_by_hand():
    model, plan = resolved(tp=2, pp=2, ep=4)
    assert plan.dp == 2  # so that tp x dp is the least multiple of ep
    memory = sampler_memory(model, plan, bf16_bits)
    assert memory.stage.layers == range(2)  # of three layers the first stage has two, and the embedding
    assert memory.parts["weights"] == 2 * (2 * (NORMS + ATTENTION // 2 + ROUTER + EXPERTS // 4) + TABLE // 2)
    cached = 2 * (512 + 10) * 2 * 8 * 1  # bytes x (all positions + the window) x (key, value) x head_dim x heads here
    assert memory.parts["KV cache"] == cached
    mxfp4 = sampler_memory(model, plan).parts["weights"]
    assert mxfp4 == 2 * (2 * (NORMS + ATTENTION // 2 + ROUTER) + TABLE // 2) + 2 * EXPERTS // 4 * 17 // 32


def test_zero_divides_among_the_copies_of_each_parameter():
    model, plan = resolved(tp=2, ep=2, dp=4)  # four copies of the experts, four of the rest
    rest, experts = (3 * (NORMS + ATTENTION // 2 + ROUTER) + TABLE + 32), 3 * EXPERTS // 2
    one, two = (learner_memory(model, dataclasses.replace(plan, zero_stage=stage)).parts for stage in (1, 2))
    assert one["fp32 masters"] == two["fp32 masters"] == 4 * (rest + experts)
    assert one["optimizer"] == 12 * (rest + experts) // 4
    assert (one["gradients"], two["gradients"]) == (4 * (rest + experts), rest + experts)
    model, plan = resolved(tp=2, ep=8, dp=4)  # one copy of the experts
    optimizer = learner_memory(model, plan).parts["optimizer"]
    assert optimizer == 12 * (rest / 4 + 3 * EXPERTS / 8)


def test_layers_are_divided_evenly_and_once():
    for pp in range(1, 8):
        found = stages(7, pp)
        assert [index for stage in found for index in stage.layers] == [*range(7)]
        assert max(len(stage.layers) for stage in found) - min(len(stage.layers) for stage in found) <= 1
        assert [stage.is_last for stage in found] == [False] * (pp - 1) + [True]


def test_a_tied_embedding_lies_on_the_first_and_the_last_stage():
    tied = dataclasses.replace(SMALL, tie_embeddings=True, num_layers=2, window_layers=[], vocab_size=4096)
    model, plan = resolved(tied, pp=2)
    memory = sampler_memory(model, plan, bf16_bits)
    assert memory.stage.is_last  # it has the final norm besides
    assert memory.parts["weights"] == 2 * (LAYER + EXPERTS + 4096 * 32 + 32)


def test_key_value_heads_are_copied_beyond_their_number():
    model, plan = resolved(tp=4)
    held = sampler_memory(model, plan, bf16_bits).parts
    assert held["KV cache"] == 2 * (512 + 10 + 512) * 2 * 8
    per_layer = NORMS + 2 * 32 * 32 // 4 + 2 * 32 * 16 // 2 + ROUTER + EXPERTS
    assert held["weights"] == 2 * (3 * per_layer + 2 * TABLE // 4 + 32)


def test_latent_attention_caches_the_latent_on_every_gpu():
    for tp in ("plan.tp=1", "plan.tp=8"):
        model, one = arguments("deepseek_v3", tp, "plan.context=1000", "plan.batch=3")
        assert sampler_memory(model, one).parts["KV cache"] == 3 * 1000 * 61 * (512 + 64) * 2


def test_activations_by_hand():
    model, plan = resolved(micro_batch_tokens=100, batch=7)
    tokens = 100
    values = 4 * 32 + (4 + 2) * 2 * 8 + 2 * (2 * 32 + 3 * 64)
    assert sampler_memory(model, plan).parts["activations"] == 2 * values * tokens + 4 * 7 * 64
    logits = 3 * 4 * 64
    again = learner_memory(model, plan).parts["activations"]
    assert again == tokens * (3 * 4 * 32 + 2 * 2 * values + logits)
    kept = learner_memory(model, dataclasses.replace(plan, recompute=False)).parts["activations"]
    assert kept == tokens * (3 * 2 * values + 2 * values + logits)


def test_the_first_stage_keeps_the_micro_batches_that_are_under_way():
    model, plan = resolved(dataclasses.replace(SMALL, num_layers=8, vocab_size=32), pp=4)
    memory = learner_memory(model, dataclasses.replace(plan, micro_batch_tokens=10**6))
    assert memory.stage.index == 0
    values = 4 * 32 + (4 + 2) * 2 * 8 + 2 * (2 * 32 + 3 * 64)
    assert memory.parts["activations"] == 10**6 * (4 * 2 * 4 * 32 + 2 * 2 * values)


@pytest.mark.parametrize("bits_of", [published_bits, bf16_bits])
def test_what_fits_fits_and_one_more_does_not(bits_of):
    model, plan = arguments("gpt_oss_20b", "plan.batch=16", "plan.context=100000")
    memory_bytes = 80e9

    def total(**changed: int) -> int:
        return sampler_memory(model, dataclasses.replace(plan, **changed), bits_of).total

    sequences = most_sequences(model, plan, memory_bytes, bits_of)
    assert sequences > 0
    assert total(batch=sequences) <= memory_bytes < total(batch=sequences + 1)
    plan.batch = 100
    context = longest_context(model, plan, memory_bytes, bits_of)
    assert 0 < context < model.max_positions
    assert total(context=context) <= memory_bytes < total(context=context + 1)
    assert most_sequences(model, plan, 1e9, bits_of) == longest_context(model, plan, 1e9, bits_of) == 0


def test_a_delta_by_hand():
    _, plan = resolved(changed_frac=0.01, bandwidth_gb_s=2.0)
    size = ModelSize(total={Part.experts: 3200, Part.attention: 1000, Part.selection_bias: 100}, active={})
    transfer = Transfer.of(size, plan)
    touched = 1 - 0.99**32
    assert transfer.delta_bytes == round(100 * touched * 21 + 1000 * 0.01 * 6 + 100 * 0.01 * 8)
    assert transfer.seconds(4e9) == 2.0
    plan.changed_frac = 1.0
    assert Transfer.of(size, plan).delta_bytes == size.published_bytes  # a delta that large is sent whole
    plan.changed_frac = 0.0
    assert Transfer.of(size, plan).delta_bytes == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "model: one preset must be chosen, got none; write model=<preset>, one of: deepseek_v3,"),
        (["model=tiny", "model=kimi_k2"], "model: one preset must be chosen, got model=tiny model=kimi_k2;"),
        (["model=kimi_k3"], "model: no such preset, got kimi_k3; did you mean 'kimi_k2'?"),
        (["plan.tq=3"], "plan.tq: no such key, got 3; did you mean 'plan.tp'?"),
        (["model.num_expert=3"], "model.num_expert: no such key, got 3; did you mean 'model.num_experts'?"),
        (["x=3"], "x: no such key, got 3; see --help"),
        (["plan.tp=five"], "plan.tp: must be a whole number, got five; the default is 1"),
        (["plan.tp="], "plan.tp: must be a whole number, got no value; the default is 1"),
        (["plan.recompute=maybe"], "plan.recompute: must be true or false, got maybe; the default is True"),
        (["plan=3"], "plan: is a section, got 3; set one of its keys, such as plan.tp=<value>"),
        (["plan.tp"], "command line: values are written key=value, got 'plan.tp'; see --help"),
        (["model.qk_norm=x"], "model.qk_norm: must be one of none, head, projection, got x; the default is none"),
        (
            ["model=kimi_k2", "model.num_experts=4", "model.num_experts=x"],
            "model.num_experts: must be a whole number, got x; the default is 384",
        ),
        (
            ["model.window_layers=3"],
            "model.window_layers: must be a list such as [0,2], got 3; the default is [0, 2, 4, ",
        ),
        (
            ["model.window_layers=[3"],
            "model.window_layers: must be a list such as [0,2], got [3; the default is [0, 2, 4, ",
        ),
        (["model.rope.attention_factor=x"], "model.rope.attention_factor: must be a number or null, got x;"),
        (["plan.tp=${x.y}"], "plan.tp: cannot be resolved, got Interpolation key 'x.y' not found;"),
        (["model.head_dim=31"], "model.head_dim: must be even (rotary pairs), got 31; use 32"),
        (["model.vocab_size=0"], "model.vocab_size: a plan needs it, got 0; give the tokenizer's number of tokens"),
        (["plan.tp=5"], "plan.tp: must divide model.num_heads=64, got 5; use 4 or 8"),
        (["plan.tp=128"], "plan.tp: must divide model.num_heads=64, got 128; use 64"),
        (
            ["model.num_kv_heads=32", "model.num_heads=96", "plan.tp=12"],
            "plan.tp: must divide model.num_kv_heads=32",
        ),
        (["plan.ep=24"], "plan.ep: must divide model.num_experts=32, got 24; use 16 or 32"),
        (["plan.ep=1000000000000"], "plan.ep: must divide model.num_experts=32, got 1000000000000; use 32"),
        (["plan.pp=25"], "plan.pp: must not exceed model.num_layers=24, got 25; a stage holds a layer"),
        (["plan.ep=2", "plan.dp=3"], "plan.ep: must divide plan.tp x plan.dp = 3, the GPUs of a stage, got 2;"),
        (
            ["plan.tp=8", "model.shared_expert_hidden_size=100"],
            "plan.tp: must divide model.shared_expert_hidden_",
        ),
        (["plan.ep=0"], "plan.ep: must be at least 1, got 0; give a positive number"),
        (["plan.dp=-1"], "plan.dp: must not be negative, got -1; 0 takes as few as plan.ep needs"),
        (["plan.zero_stage=3"], "plan.zero_stage: must be 1 or 2, got 3;"),
        (["plan.context=131073"], "plan.context: must be at most model.max_positions=131072, got 131073;"),
        (["plan.changed_frac=1.1"], "plan.changed_frac: must be between 0 and 1, got 1.1;"),
        (["plan.bandwidth_gb_s=0"], "plan.bandwidth_gb_s: must be positive, got 0.0;"),
        (["plan.gpu_memory_gb=nan"], "plan.gpu_memory_gb: must be positive, got nan;"),
    ],
)
def test_a_mistake_is_one_line(given, message, capsys):
    chosen = given if not given or given[0].startswith("model=") else ["model=gpt_oss_20b", *given]
    assert plan.main(chosen) == plan.EXIT_MISTAKE
    told = capsys.readouterr()
    assert told.out == ""
    (line,) = told.err.splitlines()
    assert line.startswith(message)


def test_several_problems_are_a_line_each():
    run = PlanRun(model=SMALL, plan=PlanConfig(tp=3, ep=3))
    with pytest.raises(PlanError) as error:
        run.resolved()
    assert [line.split(",")[0] for line in str(error.value).splitlines()] == [
        "plan.tp: must divide model.num_heads=4",
        "plan.ep: must divide model.num_experts=8",
    ]


def test_later_values_win_and_presets_with_other_sections_are_read():
    run = compose(["plan.tp=2", "model=smollm2_moe", "plan.tp=3", "model.rope.theta=1e6", "model.dense_layers=[0,1]"])
    assert (run.plan.tp, run.model.rope.theta, run.model.dense_layers) == (3, 1e6, [0, 1])
    assert run.model.num_layers == 30


@pytest.mark.parametrize("name", presets())
def test_every_preset_makes_a_table_that_fits_the_page(name):
    text = render(*arguments(name, *(["model.vocab_size=512"] if name == "tiny" or name.startswith("mini_") else [])))
    assert {"Parameters", "Loading and publishing at 10 GB/s"} <= {*text.splitlines()}
    assert max(map(len, text.splitlines())) <= 100


def test_units():
    assert [number(count) for count in (0, 999, 1000, 999_949, 999_950, 20_914_757_184, 2.8e12, 1.5e16)] == [
        "0", "999", "1.000 K", "999.9 K", "1.000 M", "20.91 B", "2.800 T", "1.500e+04 T",
    ]  # fmt: skip
    assert [amount(size) for size in (17, 13_761_264_768, 5.6e12)] == ["17 B", "13.76 GB", "5.600 TB"]
    assert [duration(seconds) for seconds in (0.0406, 119, 560, 10_000)] == ["0.0406 s", "119 s", "9.3 min", "2.8 h"]


def test_help_lists_presets_and_keys(capsys):
    assert plan.main(["--help"]) == plan.EXIT_OK
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*presets(), *(f"plan.{f.name} =" for f in dataclasses.fields(PlanConfig))))


def test_the_largest_model_is_planned_within_a_gigabyte():
    # The kernel counts a child's peak from its parent's, so the process reads its own.
    code = (
        "import sys, model.plan; model.plan.main(sys.argv[1:]); "
        "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    command = [sys.executable, "-c", code, "model=moe_2_8t", "plan.tp=8", "plan.pp=4", "plan.ep=64"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert int(text.rpartition("VmHWM:")[2].split()[0]) * 1024 < 1e9
    rows = {line.partition("│")[0].strip(): [cell.strip() for cell in line.split("│")] for line in text.splitlines()}
    assert rows["routed experts"][2:] == ["98.2%", "53.73 B", "5.502 TB", "1.461 TB", "MXFP4"]
    assert rows["all MXFP4"][5] == "1.461 TB"
    assert rows["load or full snapshot, 16 bit"][1:3] == ["5.604 TB", "9.3 min"]
    assert rows["load or full snapshot, MXFP4"][1:] == ["1.563 TB", "2.6 min", "72.1% less"]


def test_planning_does_not_import_torch():
    code = "import sys, model.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_total_is_the_sum_of_the_parts():
    (stage,) = stages(2, 1)
    assert GpuMemory(stage, {"weights": 3, "KV cache": 4}).total == 7
