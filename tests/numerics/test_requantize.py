"""Hysteresis against its definition, the clip-aware gradient against NumPy, and learners that use them."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from model.checkpoint import save_model
from model.config import Family
from model.mxfp4 import E2M1_VALUES, quantize
from model.requantize import ClippedStraightThrough, inside_range, requantize
from model.snapshot import codes_changed, digest, published_view
from rl.learner.config import CodeRounding, QuantizationConfig, StraightThroughKind
from rollout.types import WeightVersion
from tests.numerics import ranks, test_learner
from tests.numerics.families import MINI, make_model
from tests.numerics.ranks import Case
from tests.numerics.test_expert_parallel import assert_close, sample
from tests.numerics.test_learner import GRPO, LR, SAMPLES, MakeLearner

start, make = test_learner.start, test_learner.make
SETTINGS = {
    "stochastic": QuantizationConfig(rounding=CodeRounding.stochastic),
    "hysteresis": QuantizationConfig(hysteresis=0.25),
}
ON_A_BORDER = 2 * 1e-5 * 3
"""Share of the codes whose master may lie on either side of a border: masters differ by 1e-5 of themselves, a code's
band is at least a third as wide as its values are large, and it has two borders."""
EXPERT = "model.layers.0.mlp.experts.down_proj"


@pytest.mark.parametrize("hysteresis", [0.0, 0.25, 0.5])
def test_every_code_moves_exactly_beyond_its_band(hysteresis: float) -> None:
    """Every present code against masters just inside and just outside both ends; 6 pins the scale to 1."""
    grid = sorted({value + 0.0 for value in E2M1_VALUES})
    for place, value in enumerate(grid):
        for step in (-1, 1):
            if not 0 <= place + step < len(grid):
                continue
            neighbour = grid[place + step]
            edge = (value + neighbour) / 2 + hysteresis * (neighbour - value)
            for inside in (True, False):
                x = float(np.nextafter(np.float32(edge), np.float32(value if inside else 2 * neighbour - value)))
                before = quantize(torch.tensor([[value, 6.0] + [0.0] * 30]))
                w = torch.tensor([[x, 6.0] + [0.0] * 30])
                blocks, scales = requantize(w, *before, hysteresis=hysteresis)
                assert int(scales) == 127
                code = int(blocks[0, 0, 0]) & 15
                assert E2M1_VALUES[code] + 0.0 == (value if inside else neighbour), (value, x)


def test_requantizing_again_changes_no_byte_and_no_cut_does(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    w = torch.randn(40, 320)
    before = quantize(w + 0.2 * torch.randn(40, 320))
    once = requantize(w, *before, hysteresis=0.25)
    assert not torch.equal(once[0], quantize(w)[0])
    twice = requantize(w, *once, hysteresis=0.25)
    monkeypatch.setattr("model.requantize._CHUNK_BLOCKS", 7)
    cut = requantize(w, *before, hysteresis=0.25)
    for other in (twice, cut):
        assert torch.equal(once[0], other[0])
        assert torch.equal(once[1], other[1])


def test_the_clipped_gradient_is_that_of_the_definition() -> None:
    torch.manual_seed(0)
    w = torch.randn(16, 64, requires_grad=True)
    _, scales = quantize(w)
    largest = np.repeat(6.0 * 2.0 ** (scales.numpy().astype(np.float64) - 127), 32, axis=-1)
    gradient = torch.randn(16, 64)
    out = ClippedStraightThrough.apply(w, torch.zeros(16, 64), inside_range(w, scales))
    out.backward(gradient)
    assert w.grad is not None
    expected = np.where(np.abs(w.detach().numpy()) <= largest, gradient.numpy(), 0.0)
    assert 0 < (expected == 0).sum() < 200, "the control: some saturate"
    np.testing.assert_array_equal(w.grad.numpy(), expected)


@pytest.mark.parametrize("kind", SETTINGS)
def test_the_bytes_published_are_those_trained_on_and_a_checkpoint_repeats_them(
    make: MakeLearner, tmp_path: Path, kind: str
):
    learner, again = make(quantization=SETTINGS[kind], seed=3), make(quantization=SETTINGS[kind], seed=3)
    learner.update([SAMPLES[:4], SAMPLES[4:]], GRPO, LR)
    snapshot, _ = learner.snapshot(WeightVersion(0))
    assert snapshot.digests == {name: digest(name, packed) for name, packed in learner._policy.packed.items()}
    values = test_learner.published_values(learner)
    assert all(torch.equal(viewed, values[name]) for name, viewed in learner._policy._views.items())
    plain = quantize(learner._policy.masters()[EXPERT].detach())[0]
    assert not torch.equal(plain, torch.from_numpy(snapshot.tensors[EXPERT].payload.copy())), "the control"
    learner.save(tmp_path)
    again.load(tmp_path)
    for _ in range(2):
        assert again.digests() == learner.digests()
        for each in (learner, again):
            each.update([SAMPLES], GRPO, LR)
    assert again.digests() == learner.digests()


def test_masters_are_quantized_once_an_optimizer_step(make: MakeLearner) -> None:
    learner, calls = make(micro_batch_tokens=1), list[str]()
    nearest = learner._policy._requantizer._nearest
    learner._policy._requantizer._nearest = lambda w, **how: calls.append(how["name"]) or nearest(w, **how)
    learner.update([SAMPLES[:4], SAMPLES[4:]], GRPO, LR)
    assert calls.count(EXPERT) == 2


def test_without_quantization_the_forward_reads_the_masters_and_publishes_their_bytes(make: MakeLearner):
    learner = make(quantization=QuantizationConfig(enabled=False))
    before = learner.snapshot(WeightVersion(0))[0].digests
    assert learner.update([SAMPLES], GRPO, LR) is not None
    blocks, _ = quantize(learner._policy.masters()[EXPERT].detach())
    snapshot, changed = learner.snapshot(WeightVersion(1))
    assert torch.equal(torch.from_numpy(snapshot.tensors[EXPERT].payload.copy()), blocks)
    assert snapshot.digests != before
    assert changed[EXPERT].num_codes_changed > 0
    assert all(
        torch.equal(read, test_learner.masters(learner)[n].to(read.dtype)) for n, read in learner._policy._views.items()
    )


def test_clipped_gradients_are_cut_in_the_learner(make: MakeLearner) -> None:
    learner = make(quantization=QuantizationConfig(straight_through=StraightThroughKind.clipped))
    master, packed = learner._policy.masters()[EXPERT].detach().clone(), learner._policy.packed[EXPERT]
    outside = ~inside_range(master, torch.from_numpy(packed.scales.copy()))
    learner.update([SAMPLES], GRPO, LR)
    assert outside.any()
    assert not test_learner.first_gradients(learner)[EXPERT][outside].any()


@pytest.mark.parametrize("kind", SETTINGS)
def test_two_ranks_draw_and_keep_the_codes_of_one(tmp_path: Path, kind: str) -> None:
    """At a learning rate of 0 the masters of both are the same bits, so every byte must be."""
    config, folder = MINI[Family.qwen3_moe], tmp_path / "start"
    folder.mkdir()
    save_model(folder, config, dict(make_model(config).named_parameters()), {})
    samples = tuple(
        dataclasses.replace(sample(i, 12, config), routes_TLK=np.zeros((0, 0, 0), np.uint8)) for i in range(2)
    )
    case = Case(name="a", model=config, start=folder, samples=samples, lr=0.0, quantization=SETTINGS[kind])
    one = ranks.run([case], 1, tmp_path / "one")["a"].digests
    two = ranks.run([dataclasses.replace(case, expert_parallel=2)], 2, tmp_path / "two")["a"].digests
    assert one == two


def test_two_ranks_that_learn_keep_and_move_the_codes_of_one(tmp_path: Path) -> None:
    """With hysteresis, at a learning rate that moves codes; after one step by the definition, after three as one rank.

    The masters of both differ by the order of sums, so a code may differ where its master lies on a border of its band.
    """
    config, folder = MINI[Family.qwen3_moe], tmp_path / "start"
    folder.mkdir()
    start = {name: parameter.detach() for name, parameter in make_model(config).named_parameters()}
    save_model(folder, config, start, {})
    samples = tuple(
        dataclasses.replace(sample(i, 12, config), routes_TLK=np.zeros((0, 0, 0), np.uint8)) for i in range(4)
    )
    case = Case(
        name="1", model=config, start=folder, samples=samples, lr=0.5, sgd=True, quantization=SETTINGS["hysteresis"]
    )
    cases = [case, dataclasses.replace(case, name="3", num_steps=3)]
    one = ranks.run(cases, 1, tmp_path / "one")
    two = ranks.run([dataclasses.replace(case, expert_parallel=2) for case in cases], 2, tmp_path / "two")
    before = published_view(start)
    for found in (one["1"], two["1"]):
        moved = codes_changed(before, found.published)
        for name, changes in moved.items():
            master, first = found.masters[name], before[name]
            old = torch.from_numpy(first.payload), torch.from_numpy(first.scales)
            blocks, scales = requantize(master, *old, hysteresis=0.25)
            assert torch.equal(torch.from_numpy(found.published[name].payload), blocks), name
            assert torch.equal(torch.from_numpy(found.published[name].scales), scales), name
            nearest = quantize(master)[0]
            assert changes.num_codes_changed, "the control: codes move"
            assert not torch.equal(blocks, nearest), "the control: codes are kept"
    for step in ("1", "3"):
        assert_close(two[step].masters, one[step].masters)
        differing = codes_changed(one[step].published, two[step].published)
        assert sum(each.num_codes_changed for each in differing.values()) <= ON_A_BORDER * sum(
            each.num_codes for each in differing.values()
        )
