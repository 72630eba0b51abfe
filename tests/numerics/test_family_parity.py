"""The network and the loader against `transformers`: same checkpoint, same tokens, same logits.

Five seeds a family, each with a shape, a rotary embedding and options of its own; one expert is never chosen. One pass
over 200 tokens crosses every border: a causal model's logits at a position are those of the prompt that ends there.
"""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import transformers

from model.config import ComputeDtype, Family
from model.hf.reader import open_hf
from model.hf.writer import HfFormat, save_hf
from model.kernels.attention.eager import EagerAttention
from model.kernels.attention.reference import PageTable
from model.packed_attention import PackedAttention
from model.transformer import Transformer
from rollout.config import EngineConfig
from rollout.engine.kv_cache import KvCache
from rollout.engine.runner import PagedAttend
from tests.numerics import transformers_models
from tests.numerics.transformers_models import ORIGINAL_POSITIONS, WINDOW

SEEDS = range(5)
LENGTH = 200
FP32 = 1e-4
"""Logits below 10 carry 10 * 2^-24 a rounding; products in another order of sums make a hundred of them."""

BF16 = 2e-2
"""Logits of 4 with a step of 2^-8: what a handful of roundings to bf16 before them may add up to."""

BORDERS = sorted(
    {1, 2, *range(WINDOW - 1, WINDOW + 3), *range(ORIGINAL_POSITIONS - 1, ORIGINAL_POSITIONS + 3), 199, 200}
)


@cache
def pair(family, seed):
    """transformers' model and ours, read from the files that transformers wrote."""
    theirs = transformers_models.mini(family, seed)
    with TemporaryDirectory() as folder:
        transformers_models.write(theirs, Path(folder))
        loaded = open_hf(folder).load()
    ours = Transformer(loaded.config)
    ours.load_state_dict(loaded.masters(), strict=True)
    ids_T = torch.randint(0, loaded.config.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(seed))
    return theirs, ours.requires_grad_(False), ids_T


def with_dtype(model, dtype):
    """The same weights, computed in `dtype`."""
    config = type(model.config).from_dict({**model.config.to_dict(), "compute_dtype": dtype})
    other = Transformer(config)
    other.load_state_dict(model.state_dict())
    return other.requires_grad_(False)


def forward(model, ids_T, replay_TLK=None):
    """Logits [T, V] and routes of one sequence in one pass."""
    out = model(ids_T, torch.arange(len(ids_T)), PackedAttention([0, len(ids_T)]), replay_TLK)
    return model.logits(out.hidden_TD), out.routes_TLK


def on_a_cache(model, ids_T, chunks, replay_TLK=None):
    """Logits [T, V] when the tokens come in runs of the lengths `chunks`, on a cache."""
    config = EngineConfig(max_batch_size=1, max_seq_len=len(ids_T))
    cache = KvCache(model.config, config)
    pages_NB = torch.randperm(cache.num_pages, generator=torch.Generator().manual_seed(0)).int().unsqueeze(0)
    positions_T = torch.arange(len(ids_T))
    slots_T = pages_NB[0].long()[positions_T // config.page_size] * config.page_size + positions_T % config.page_size
    outs, start = [], 0
    for count in chunks:
        new = slice(start, start + count)
        table = PageTable(pages_NB, torch.tensor([start]).int(), torch.tensor([count]).int(), config.page_size)
        attend = PagedAttend(cache, EagerAttention(), slots_T[new], table)
        out = model(ids_T[new], positions_T[new], attend, None if replay_TLK is None else replay_TLK[new])
        outs.append(model.logits(out.hidden_TD))
        start += count
    return torch.cat(outs)


def largest_difference(a, b):
    assert a.shape == b.shape
    return (a.float() - b.float()).abs().max().item()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", Family)
def test_fp32_logits_are_those_of_transformers(family, seed):
    theirs, ours, ids_T = pair(family, seed)
    expected = transformers_models.logits(theirs, ids_T)
    actual, routes_TLK = forward(ours, ids_T)
    assert expected.abs().max() > 0.6
    assert largest_difference(actual, expected) <= FP32
    chosen = set(routes_TLK.unique().tolist())
    assert 0 not in chosen  # its weights are read and never used
    assert len(chosen) > 3
    for length in BORDERS:
        alone = transformers_models.logits(theirs, ids_T[:length])
        assert largest_difference(forward(ours, ids_T[:length])[0], alone) <= FP32, length


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", Family)
def test_bf16_logits_are_close_to_those_of_transformers(family, seed):
    """Against transformers in fp32 on the same bf16 weights, with its routes: what bf16 arithmetic costs, no more."""
    theirs, ours, ids_T = pair(family, seed)
    expected = transformers_models.logits(theirs, ids_T)
    _, routes_TLK = forward(ours, ids_T)
    actual, _ = forward(with_dtype(ours, ComputeDtype.bf16), ids_T, routes_TLK)
    difference = largest_difference(actual, expected)
    assert difference <= BF16


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", Family)
def test_decoding_on_a_cache_gives_the_logprobs_of_one_pass(family, seed):
    """Token by token from length 1 to 200, and in runs that start and end beside every border."""
    _, ours, ids_T = pair(family, seed)
    logits_TV, routes_TLK = forward(ours, ids_T)
    expected = logits_TV.log_softmax(-1)
    one_by_one = on_a_cache(ours, ids_T, [1] * LENGTH).log_softmax(-1)
    assert largest_difference(one_by_one, expected) <= FP32
    runs = [after - before for before, after in zip([0, *BORDERS[:-1]], BORDERS, strict=True)]
    assert largest_difference(on_a_cache(ours, ids_T, runs).log_softmax(-1), expected) <= FP32
    narrow = with_dtype(ours, ComputeDtype.bf16)
    in_one = forward(narrow, ids_T, routes_TLK)[0].log_softmax(-1)
    assert largest_difference(on_a_cache(narrow, ids_T, [1] * LENGTH, routes_TLK).log_softmax(-1), in_one) <= BF16


WITHOUT = {
    (Family.mixtral, 0): {"rope": {"theta": 2e4}},
    (Family.olmoe, 0): {"normalize_topk": None},
    (Family.qwen3_moe, 0): {"normalize_topk": None, "num_experts_per_tok": 2},
    (Family.gpt_oss, 1): {"sliding_window": WINDOW + 1},
    (Family.gpt_oss, 2): {"rope": {"truncate": True}},
    (Family.gpt_oss, 0): {"swiglu_alpha": 1.0},
    (Family.gpt_oss, 3): {"rope": {"attention_factor": 1.0}},
    (Family.deepseek_v3, 0): {"routed_scaling": 1.0},
    (Family.deepseek_v3, 1): {"rope": {"adjacent_pairs": None}},
    (Family.deepseek_v3, 2): {"num_groups_per_tok": 1, "num_expert_groups": 1},
}
"""What is told differently to the network of a family and seed (`None`: the opposite)."""


@pytest.mark.parametrize(("family", "seed"), WITHOUT)
def test_the_comparison_notices_what_is_told_wrong(family, seed):
    theirs, ours, ids_T = pair(family, seed)
    values = ours.config.to_dict()
    for key, value in WITHOUT[family, seed].items():
        node, changes = (values["rope"], value) if key == "rope" else (values, {key: value})
        node |= {name: not node[name] if new is None else new for name, new in changes.items()}
    wrong = Transformer(type(ours.config).from_dict(values))
    wrong.load_state_dict(ours.state_dict())
    difference = largest_difference(forward(wrong, ids_T)[0], transformers_models.logits(theirs, ids_T))
    assert difference > 5 * BF16


@pytest.mark.parametrize("family", Family)
def test_our_bf16_export_gives_transformers_the_same_logits_to_the_last_bit(family, tmp_path):
    theirs, ours, ids_T = pair(family, 0)
    save_hf(tmp_path, ours.config, ours.state_dict().items(), HfFormat.BF16)
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.float32, local_files_only=True
    )
    assert torch.equal(transformers_models.logits(again, ids_T), transformers_models.logits(theirs, ids_T))


def test_our_mxfp4_export_of_gpt_oss_gives_transformers_the_logits_of_the_published_view(tmp_path):
    _, ours, ids_T = pair(Family.gpt_oss, 1)
    save_hf(tmp_path, ours.config, ours.state_dict().items(), HfFormat.MXFP4)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.float32, local_files_only=True,
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    )  # fmt: skip
    quantized = Transformer(ours.config)
    quantized.load_state_dict(open_hf(tmp_path).load().masters())
    expected = transformers_models.logits(theirs.float(), ids_T)
    assert largest_difference(forward(quantized.requires_grad_(False), ids_T)[0], expected) <= FP32
    assert largest_difference(forward(ours, ids_T)[0], expected) > BF16  # quantizing did change something
