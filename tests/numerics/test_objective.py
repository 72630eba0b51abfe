"""Importance correction and entropy bonus against NumPy, in fp64; gradients against central differences.

What is left are roundings of exp and of sums in another order; central differences add step^2 |J'''| + 1e-16 / step.
"""

import dataclasses

import numpy as np
import pytest
import torch

from rl.algorithms.base import AlgorithmError, TokenStreams
from rl.algorithms.config import AlgorithmConfig, Importance, ImportanceLevel
from rl.algorithms.importance import Correction
from rl.algorithms.objective import Objective
from rl.algorithms.registry import build_algorithm

STEP = 1e-6
LENGTHS = np.array([4, 1, 3])
BEHAVIOR = np.linspace(-3.0, -0.5, 8)
PROXIMAL = BEHAVIOR + np.log([1.0, 0.4, 3.0, 1.1, 2.5, 0.9, 1.3, 1.4])
POLICY = PROXIMAL + np.log([1.0, 1.1, 0.7, 1.4, 1.1, 2.0, 0.5, 0.95])
ADVANTAGES = np.array([1.0, 1.0, 1.0, 1.0, -0.5, 2.0, 2.0, 2.0])
CAP = 1.5


def streams(policy: np.ndarray, proximal: np.ndarray = PROXIMAL) -> TokenStreams:
    return TokenStreams(
        policy_logprobs_R=torch.tensor(policy, requires_grad=True),
        behavior_logprobs_R=torch.tensor(BEHAVIOR),
        advantages_R=torch.tensor(ADVANTAGES),
        sequence_R=torch.arange(3).repeat_interleave(torch.tensor(LENGTHS)),
        proximal_logprobs_R=torch.tensor(proximal),
    )


def config(kind: Importance, level: ImportanceLevel = ImportanceLevel.token, name: str = "grpo") -> AlgorithmConfig:
    return AlgorithmConfig(name=name, importance=kind, importance_level=level, importance_cap=CAP)


def objective(settings: AlgorithmConfig) -> Objective:
    return Objective(build_algorithm(settings), settings)


def expected_weights(kind: Importance, level: ImportanceLevel) -> np.ndarray:
    ratios: list[float] = []
    for one in np.split(PROXIMAL - BEHAVIOR, LENGTHS.cumsum()[:-1]):
        whole = np.exp(one.sum() if level is ImportanceLevel.sequence else one.mean())
        ratios += np.exp(one).tolist() if level is ImportanceLevel.token else [whole] * len(one)
    return np.array([r if r <= CAP else (CAP if kind is Importance.truncate else 0.0) for r in ratios])


@pytest.mark.parametrize("level", ImportanceLevel)
@pytest.mark.parametrize("kind", [Importance.truncate, Importance.mask])
def test_the_decoupled_objective_and_its_gradient(kind: Importance, level: ImportanceLevel):
    """arXiv 2505.24298 eq. 5 with cut weights: the clip is of policy / proximal, the weight proximal / behavior."""
    weights = expected_weights(kind, level)

    def negated(policy: np.ndarray) -> float:
        ratio = np.exp(policy - PROXIMAL)
        return -float((weights * np.minimum(ratio * ADVANTAGES, np.clip(ratio, 0.8, 1.28) * ADVANTAGES)).sum())

    given = streams(POLICY)
    loss = objective(config(kind, level)).token_loss(given)
    loss.total().sum().backward()
    assert float(loss.total().sum().detach()) == pytest.approx(negated(POLICY), rel=1e-12)
    differences = [(negated(POLICY + one) - negated(POLICY - one)) / (2 * STEP) for one in np.eye(8) * STEP]
    np.testing.assert_allclose(given.policy_logprobs_R.grad, differences, atol=1e-8)
    np.testing.assert_allclose(loss.watched["importance/mean"], weights, rtol=1e-12)
    assert 0 < loss.watched["importance/cut_frac"].sum() < 8, "both sides of the cap are met"


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "rloo"])
@pytest.mark.parametrize("level", ImportanceLevel)
@pytest.mark.parametrize("kind", [Importance.truncate, Importance.mask])
def test_on_policy_every_weight_is_exactly_one_and_the_loss_that_of_the_algorithm(kind, level, name):
    given = streams(POLICY, proximal=BEHAVIOR)
    settings = config(kind, level, name)
    loss, alone = objective(settings).token_loss(given), build_algorithm(settings).token_loss(given)
    assert (loss.watched["importance/mean"] == 1).all()
    assert not loss.watched["importance/cut_frac"].any()
    assert torch.equal(loss.total(), alone.loss_R)
    assert torch.equal(loss.clipped_R, alone.clipped_R)


def test_at_zero_update_the_clipped_ratio_is_exactly_one_however_stale_the_samples_are():
    loss = objective(config(Importance.truncate)).token_loss(streams(PROXIMAL))
    assert torch.equal(loss.loss_R, loss.watched["importance/mean"] * -torch.tensor(ADVANTAGES))
    assert not loss.clipped_R.any()
    coupled = objective(config(Importance.none)).token_loss(streams(PROXIMAL))
    assert coupled.clipped_R.any(), "the control: one ratio for both jobs clips them for their age"
    assert coupled.watched.keys() == {"ratio/mean"}
    assert (loss.watched["ratio/mean"] == 1).all()
    torch.testing.assert_close(coupled.watched["ratio/mean"], torch.tensor(np.exp(PROXIMAL - BEHAVIOR)))


@pytest.mark.parametrize("level", ImportanceLevel)
def test_a_sequences_weight_does_not_depend_on_the_others(level: ImportanceLevel):
    given = streams(POLICY)
    weights_R, _ = Correction(Importance.truncate, level, CAP).weights(given)
    for sequence in range(3):
        mine_R = given.sequence_R == sequence
        alone = TokenStreams(
            policy_logprobs_R=given.policy_logprobs_R[mine_R],
            behavior_logprobs_R=given.behavior_logprobs_R[mine_R],
            advantages_R=given.advantages_R[mine_R],
            sequence_R=torch.zeros(int(mine_R.sum()), dtype=torch.int64),
            proximal_logprobs_R=torch.tensor(PROXIMAL)[mine_R],
        )
        part_R, _ = Correction(Importance.truncate, level, CAP).weights(alone)
        torch.testing.assert_close(part_R, weights_R[mine_R], rtol=1e-14, atol=0)


def test_weights_that_overflow_are_cut_and_leave_no_nan():
    given = dataclasses.replace(streams(POLICY), behavior_logprobs_R=torch.tensor(BEHAVIOR - 1e4))
    for kind, value in ((Importance.truncate, CAP), (Importance.mask, 0.0)):
        weights_R, cut_R = Correction(kind, ImportanceLevel.sequence, CAP).weights(given)
        assert (weights_R == value).all()
        assert cut_R.all()


def test_a_correction_without_proximal_logprobs_or_with_a_cap_below_one_is_refused():
    bare = dataclasses.replace(streams(POLICY), proximal_logprobs_R=None)
    with pytest.raises(AlgorithmError, match=r"^algorithm\.importance: needs the learner's logprobs at the start of"):
        objective(config(Importance.mask)).token_loss(bare)
    for cap in (0.5, float("nan")):
        with pytest.raises(AlgorithmError, match=r"^algorithm\.importance_cap: a correction needs a cap of at least 1"):
            Correction(Importance.mask, ImportanceLevel.token, cap)


def test_the_entropy_bonus_lowers_the_loss_and_is_computed_only_when_it_counts():
    calls: list[int] = []

    def computed() -> torch.Tensor:
        calls.append(1)
        return torch.full((8,), 0.5, dtype=torch.float64)

    given = dataclasses.replace(streams(POLICY), entropies=computed)
    off = objective(AlgorithmConfig()).token_loss(given)
    assert (off.terms, calls) == ({}, [])
    on = objective(AlgorithmConfig(entropy_coef=0.1)).token_loss(given)
    assert len(calls) == 1
    torch.testing.assert_close(on.total(), off.total() - 0.05)
    assert (on.terms["loss/entropy"] == -0.05).all()
    with pytest.raises(AlgorithmError, match=r"^algorithm\.entropy_coef: needs entropies, got streams without; "):
        objective(AlgorithmConfig(entropy_coef=0.1)).token_loss(streams(POLICY))
