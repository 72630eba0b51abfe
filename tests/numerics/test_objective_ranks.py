"""Reference, value head, importance weights and entropy bonus on two ranks that share the experts out, against one."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from model.checkpoint import load_model, save_model
from model.config import Family
from model.snapshot import PackedTensor, digest
from rl.algorithms.config import AlgorithmConfig, Importance, ImportanceLevel
from tests.numerics import ranks
from tests.numerics.families import MINI, make_model
from tests.numerics.ranks import Case
from tests.numerics.test_expert_parallel import TOLERANCE, assert_close, sample

CONFIG = MINI[Family.qwen3_moe]
EVERYTHING = AlgorithmConfig(
    name="ppo", kl_coef=0.1, entropy_coef=0.01, importance=Importance.truncate,
    importance_level=ImportanceLevel.geometric, value_lr=1e-2,
)  # fmt: skip


def reference_digests(folder: Path) -> dict[str, str]:
    """Of the tensors: the order of a file's metadata is safetensors' own."""
    weights = load_model(folder / "reference").weights
    return {name: digest(name, packed) for name, packed in weights.items() if isinstance(packed, PackedTensor)}


def test_two_ranks_are_one_and_checkpoints_do_not_tell(tmp_path: Path):
    start, first, second = (tmp_path / name for name in ("start", "one", "two"))
    for folder in (start, first, second):
        folder.mkdir()
    save_model(start, CONFIG, dict(make_model(CONFIG).named_parameters()), {})
    samples = tuple(sample(i, 12 + i, CONFIG) for i in range(5))  # the second rank pads
    common = {"model": CONFIG, "start": start, "samples": samples, "algorithm": EVERYTHING, "replay": True}
    steps = Case(**common, name="steps", sgd=True, num_steps=3)
    one = ranks.run([steps, Case(**common, name="saved", num_steps=2, save=first)], 1, tmp_path / "job one")
    again = Case(**common, name="again", load=first, num_steps=0, save=second, expert_parallel=2)
    on = Case(**common, name="on", load=first, num_steps=1, expert_parallel=2)
    two = ranks.run([dataclasses.replace(steps, expert_parallel=2), again, on], 2, tmp_path / "job two")
    straight = ranks.run([dataclasses.replace(on, expert_parallel=1)], 1, tmp_path / "job three")

    assert_close(two["steps"].masters, one["steps"].masters)
    assert one["steps"].head["weight"].abs().max() > 0.005, "the control: it learned"
    for name, value in one["steps"].head.items():
        torch.testing.assert_close(two["steps"].head[name], value, rtol=1e-3, atol=1e-5)
    for got, expected in zip(
        two["steps"].terms + two["steps"].watched, one["steps"].terms + one["steps"].watched, strict=True
    ):
        assert got.keys() == expected.keys()
        np.testing.assert_allclose(list(got.values()), list(expected.values()), rtol=20 * TOLERANCE, atol=1e-7)
    assert one["steps"].terms[-1].keys() == {"loss/kl", "loss/entropy", "loss/value"}
    assert one["steps"].terms[-1]["loss/kl"] > 1e-5
    left, right = (found["steps"].parity for found in (one, two))
    assert left is not None
    assert right is not None
    for key, scores in left.scores.items():
        for stream in ("proximal_logprobs_R", "reference_logprobs_R", "values_R"):
            np.testing.assert_array_equal(getattr(right.scores[key], stream), getattr(scores, stream))

    for name in ("model.safetensors", "optimizer.safetensors", "value_head.safetensors"):
        assert (second / name).read_bytes() == (first / name).read_bytes(), name
    assert reference_digests(second) == reference_digests(first)
    after, before = two["on"].parity, one["saved"].parity
    assert after is not None
    assert before is not None
    for key, scores in before.scores.items():  # the reference did not move
        np.testing.assert_array_equal(after.scores[key].reference_logprobs_R, scores.reference_logprobs_R)
    (got, *_), (expected, *_) = two["on"].losses[0], straight["on"].losses[0]
    np.testing.assert_allclose(got, expected, rtol=20 * TOLERANCE)
    assert two["on"].terms[0] == pytest.approx(straight["on"].terms[0], rel=20 * TOLERANCE)
