"""Dense Llamas of transformers, with random weights, against the same weights upcycled: the same logits."""

import json
import math

import pytest
import torch

from model.config import ModelConfig
from model.llama import from_llama, llama_config
from model.packed_attention import PackedAttention
from model.transformer import Transformer
from model.upcycle import Copies, Split, upcycle
from tests.numerics.tolerances import relative_error, summed

transformers = pytest.importorskip("transformers")

HIDDEN, WIDTH, LAYERS, LENGTH = 96, 192, 2, 50
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
VARIANTS = {
    "plain": {},
    "untied": {"tie_word_embeddings": False},
    "one_kv_head": {"num_key_value_heads": 1},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "llama3": {"rope_parameters": {**LLAMA3, "rope_theta": 1e4, "original_max_position_embeddings": 16}},
}
EXACT = {
    "one expert": None,
    "split in 2": Split(num_experts=2, num_experts_per_tok=2),
    "split in 6": Split(num_experts=6, num_experts_per_tok=6),
    "1 of 4 copies": Copies(num_experts=4, num_experts_per_tok=1),
    "3 of 4 copies": Copies(num_experts=4, num_experts_per_tok=3),
}
TOLERANCE = math.sqrt(6 * LAYERS + 1) * summed(WIDTH)
"""A layer chains six products (queries and keys, scores, values, output, gate and up, down), the logits are one more;
their errors add up like a random walk."""


def dense(**options):
    """A Llama of transformers whose attention and MLPs matter: its weights are of the order 1 / sqrt(fan in)."""
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=6,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        initializer_range=0.15,
        **{"num_key_value_heads": 2, "tie_word_embeddings": True, **options},
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


@torch.no_grad()
def logits(config: ModelConfig, weights, ids):
    with torch.device("meta"):
        model = Transformer(config)
    model.load_state_dict(weights, assign=True)
    out = model(ids, torch.arange(len(ids)), PackedAttention([0, len(ids)]))
    return model.logits(out.hidden_TD)


@pytest.mark.parametrize("recipe", EXACT.values(), ids=EXACT)
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_logits_are_those_of_the_dense_model(options, recipe):
    reference = dense(**options)
    ids = torch.randint(64, (LENGTH,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(ids[None]).logits[0]
    config = llama_config(json.loads(reference.config.to_json_string()))
    masters = from_llama(config, reference.state_dict())
    if recipe is not None:
        config, masters = upcycle(config, masters, recipe)
    assert relative_error(logits(config, masters, ids), expected) < TOLERANCE


@pytest.mark.parametrize(
    "recipe",
    [Split(num_experts=6, num_experts_per_tok=5), Copies(num_experts=4, perturbation=0.02)],
    ids=["fewer experts than all", "perturbed copies"],
)
def test_what_is_called_approximate_is_near_but_not_equal(recipe):
    reference = dense()
    ids = torch.randint(64, (LENGTH,), generator=torch.Generator().manual_seed(1))
    config = llama_config(json.loads(reference.config.to_json_string()))
    masters = from_llama(config, reference.state_dict())
    exact = logits(config, masters, ids)
    error = relative_error(logits(*upcycle(config, masters, recipe), ids), exact)
    assert 100 * TOLERANCE < error < 1.0
