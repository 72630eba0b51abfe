"""Experts on disk: the same bits in a fraction of the memory."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from model.checkpoint import save_model
from model.config import Family, ModelConfig
from model.hf.writer import HfFormat, save_hf
from model.kernels.cpu.isa import available_isas
from model.snapshot import published_view
from model.transformer import Transformer, init_weights
from rollout.config import EngineConfig, LoadMode
from rollout.engine.engine import Engine
from rollout.engine.mapped import MappedExperts
from rollout.types import SamplingParams

pytestmark = pytest.mark.skipif(not available_isas(), reason="the kernels need a compiler")

CONFIG = ModelConfig(
    vocab_size=64, hidden_size=128, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32, expert_hidden_size=256,
    num_experts=8, num_experts_per_tok=2, family=Family.mixtral, router_bias=False,
)  # fmt: skip
PROMPTS = [tuple(range(start, start + 9)) for start in (1, 20, 40)]
PARAMS = SamplingParams(max_tokens=12)
SMALL = EngineConfig(max_batch_size=4, max_seq_len=64)


def write(folder, form):
    """A checkpoint as a run saves it, as a run publishes it, or as another program stores it."""
    folder.mkdir()
    model = Transformer(CONFIG)
    init_weights(model, 0)
    masters = {name: tensor.detach() for name, tensor in model.named_parameters()}
    if form == "foreign":
        save_hf(folder, CONFIG, masters.items(), HfFormat.BF16)
    else:
        save_model(folder, CONFIG, masters if form == "masters" else published_view(masters), {})
    return folder


def resident_kib(address):
    """What the process holds of the mapping that begins at `address`."""
    found = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            found = int(match[1], 16) <= address < int(match[2], 16)
        elif found and line.startswith("Rss:"):
            return int(line.split()[1])
    raise AssertionError("no such mapping")


@pytest.mark.parametrize("form", ["masters", "published", "foreign"])
def test_a_model_larger_than_its_budget_gives_the_same_bits(tmp_path, form):
    folder = write(tmp_path / "checkpoint", form)
    whole = Engine.load(folder, SMALL)
    expected = whole.generate(PROMPTS, PARAMS)
    expert_bytes = 3 * 256 * 128 * 17 // 32
    budget = 6 * expert_bytes
    for bound in (0, budget):
        engine = Engine.load(folder, dataclasses.replace(SMALL, load=LoadMode.mmap, expert_memory_bytes=bound))
        for prompt, one in zip(PROMPTS, expected, strict=True):
            (alone,) = engine.generate([prompt], dataclasses.replace(PARAMS, temperature=0.0))
            (same,) = whole.generate([prompt], dataclasses.replace(PARAMS, temperature=0.0))
            assert alone.ids == same.ids
            assert alone.logprobs_T.tobytes() == same.logprobs_T.tobytes()
            assert len(one.ids) == PARAMS.max_tokens
        together = engine.generate(PROMPTS, PARAMS)
        assert [one.logprobs_T.tobytes() for one in together] == [one.logprobs_T.tobytes() for one in expected]
        experts = engine._kernels.layers.experts
        assert isinstance(experts, MappedExperts)
        all_bytes = CONFIG.num_layers * CONFIG.num_experts * expert_bytes
        if bound:
            # The last step chose at most 3 x 2 experts a layer, and those of one layer fit.
            assert experts.num_bytes_held <= budget
            assert experts.num_bytes_read > all_bytes
        else:
            assert experts.num_bytes_held == experts.num_bytes_read <= all_bytes
    assert whole.running_views().keys() == engine.running_views().keys()


def test_what_is_dropped_leaves_the_memory():
    isa = available_isas()[0]
    blocks = torch.randint(0, 256, (4, 1024, 16, 16), dtype=torch.uint8)
    scales = torch.full((4, 1024, 16), 127, dtype=torch.uint8)
    experts = MappedExperts(isa, budget_bytes=1)
    packed = experts.pack_matrix(blocks, scales)
    address = packed.codes_ESB.data_ptr()
    assert [torch.equal(a, b) for a, b in zip(experts.unpack_matrix(packed), (blocks, scales), strict=True)] == [
        True
    ] * 2
    held = resident_kib(address)
    assert held >= 4 * 1024 * 16 * 17 // 1024  # unpacking has read all of it
    experts._choose(address, [0, 1, 2, 3])
    experts._keep_within_budget(num_needed=1)
    assert experts.num_bytes_held == 1024 * 16 * 17
    assert resident_kib(address) < 0.4 * held  # one expert, and pages on the borders
    assert torch.equal(experts.unpack_matrix(packed)[0], blocks)
