from dataclasses import replace

import numpy as np
import pytest

from rl.advantage import Credit, Weighing, assign_credit, has_variance
from rl.algorithms.config import Aggregation, KlEstimator
from rl.algorithms.config import Credit as CreditStep
from rl.algorithms.grpo import Grpo
from rl.algorithms.overlong import Overlong
from rl.algorithms.ppo import Ppo
from rl.algorithms.surrogate import Clip
from rl.batch import TrainSample
from rl.episodes import Episodes, TooFewValidError, turn_lengths, valid_episodes
from rl.scores import SampleScores
from rl.shaping import KlReward, ScoresError, Shaping
from rollout.types import RewardNode, ScoredGroup

OVER_TOKENS = Weighing(aggregation=Aggregation.token_mean, length_unit=8)
GRPO = Grpo(clip=Clip(0.2, 0.28), normalize=False)


def credit_of(*groups: ScoredGroup, min_valid_frac: float = 0.0, permute_key: tuple[int, ...] | None = None) -> Credit:
    episodes = valid_episodes(groups, min_valid_frac=min_valid_frac)
    assert not any(sample.trained for sample in episodes.samples)
    credit = assign_credit(episodes, GRPO, OVER_TOKENS, scores={}, shaping=Shaping(), permute_key=permute_key)
    assert [sample.key for sample in credit.samples] == [sample.key for sample in episodes.samples]
    return credit


def first_said(credit: Credit) -> list[int]:
    """The first sampled id of each sample: which episode it is."""
    return [int(sample.ids_T[sample.targets_R[0]]) for sample in credit.samples]


def advantage_of(credit: Credit) -> list[float]:
    for sample in credit.samples:
        assert len(set(sample.advantages_R.tolist())) == 1
    return [float(sample.advantages_R[0]) for sample in credit.samples]


def test_each_episode_gets_its_own_reward_minus_the_mean_of_its_group(hand):
    credit = credit_of(hand.group(1.0, 0.0, 0.0, 0.0), hand.group(0.0, 3.0))
    assert first_said(credit) == [20, 21, 22, 23, 20, 21]
    assert advantage_of(credit) == [0.75, -0.25, -0.25, -0.25, -1.5, 1.5]
    assert all(sample.trained for sample in credit.samples)
    assert (credit.num_masked, credit.no_variance_frac) == (0, 0.0)


def test_a_masked_episode_leaves_before_the_baseline_and_is_never_a_reward_of_zero(hand):
    credit = credit_of(hand.group(1.0, "sandbox: lost", 0.5, "reward: raised"))
    assert first_said(credit) == [20, 22]  # the rewards stay with their own episodes
    assert advantage_of(credit) == [0.25, -0.25]  # mean 0.75, not 0.375
    assert credit.num_masked == 2


def test_a_group_without_variance_is_counted_and_kept_for_the_gate_only(hand):
    credit = credit_of(hand.group(1.0, 1.0), hand.group(0.0, 1.0), hand.group("x", "x"), hand.group("x", 0.0))
    assert [sample.trained for sample in credit.samples] == [False, False, True, True, False]
    assert advantage_of(credit) == [0.0, 0.0, -0.5, 0.5, 0.0]
    assert credit.no_variance_frac == 0.75


def test_keys_are_unique_over_groups_episodes_and_segments(hand):
    group = hand.group(0.0, 1.0)
    segments = (hand.segment((1,), ((), (5, 6))), hand.segment((1, 2), ((), (7,))), hand.segment((3,)))
    long = hand.scored(hand.trajectory(*segments, index=2), 0.5)
    credit = credit_of(ScoredGroup(task=group.task, scored=(*group.scored, long)), hand.group(0.0, 1.0))
    assert [sample.key for sample in credit.samples] == [
        "0000/0000/0", "0000/0001/0", "0000/0002/0", "0000/0002/1", "0001/0000/0", "0001/0001/0"
    ]  # fmt: skip
    # Both segments of the episode carry its advantage; the one without a turn has nothing to train.
    assert advantage_of(credit)[:4] == [-0.5, 0.5, 0.0, 0.0]


def test_an_episode_without_a_turn_counts_in_the_baseline_but_has_no_sample(hand):
    silent = hand.scored(hand.trajectory(hand.segment((1, 2)), index=1), 0.0)
    spoke = hand.group(1.0).scored[0]
    credit = credit_of(ScoredGroup(task=hand.task(), scored=(spoke, silent)))
    assert advantage_of(credit) == [0.5]


def test_permuted_rewards_stay_in_their_group_and_follow_the_key_alone(hand):
    groups = [hand.group(*(100 * g + float(i) for i in range(8))) for g in range(6)]

    def permuted(*key: int) -> np.ndarray:
        credit = credit_of(*groups, permute_key=key)
        assert first_said(credit) == list(range(20, 28)) * 6
        return np.array(advantage_of(credit)).reshape(6, 8)

    straight = np.array(advantage_of(credit_of(*groups))).reshape(6, 8)
    shuffled = permuted(0, 1)
    np.testing.assert_array_equal(np.sort(shuffled, axis=1), np.sort(straight, axis=1))
    assert (shuffled != straight).any(axis=1).all()
    assert len({tuple(row) for row in shuffled}) == 6  # each group has its own permutation
    np.testing.assert_array_equal(permuted(0, 1), shuffled)
    assert (permuted(0, 2) != shuffled).any()
    assert (permuted(1, 1) != shuffled).any()


def test_permuting_moves_only_rewards_of_valid_episodes(hand):
    credit = credit_of(hand.group(1.0, "x", 0.0, 2.0), permute_key=(0, 1))
    assert first_said(credit) == [20, 22, 23]
    assert sorted(advantage_of(credit)) == [-1.0, 0.0, 1.0]


def test_too_many_masked_episodes_end_the_round_with_one_clear_line(hand):
    groups = (hand.group(1.0, "sandbox: pool gone\n  at line 3\nRuntimeError: no fork"), hand.group("late", "late"))
    with pytest.raises(TooFewValidError) as caught:
        credit_of(*groups, min_valid_frac=0.5)
    assert str(caught.value) == (
        "rollout.min_valid_frac: at least 50% of the episodes must be valid, got 1 of 4 "
        "(first reason: RuntimeError: no fork); fix the cause and run again"
    )


def test_a_mask_without_a_reason_still_ends_the_round_by_name(hand):
    with pytest.raises(TooFewValidError, match=r"got 0 of 1 \(first reason: none given\)"):
        credit_of(hand.group(""), min_valid_frac=0.5)


@pytest.mark.parametrize(("share", "valid"), [(0.9, 9), (0.7, 7), (0.3, 3), (1.0, 10), (0.07, 7)])
def test_exactly_the_required_share_is_enough(hand, share: float, valid: int):
    total = 100 if share == 0.07 else 10
    rewards = [*(float(i) for i in range(valid)), *(["x"] * (total - valid))]
    assert credit_of(hand.group(*rewards), min_valid_frac=share).num_masked == total - valid
    with pytest.raises(TooFewValidError):
        credit_of(hand.group(*rewards[1:], "x"), min_valid_frac=share)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        (Aggregation.token_mean, [(1, 1), (1, 1), (1, 1)]),
        (Aggregation.episode_mean, [(1 / 5, 1 / 5), (1 / 5, 1 / 5), (1, 1)]),
        (Aggregation.episode_sum, [(1 / 8, 1 / 5), (1 / 8, 1 / 5), (1 / 8, 1)]),
    ],
)
def test_tokens_are_weighed_by_the_length_of_their_episode_over_all_its_segments(hand, aggregation, expected):
    long = hand.scored(hand.trajectory(hand.segment((1,), ((), (5, 6))), hand.segment((1, 2), ((), (7, 8, 9)))), 1.0)
    short = hand.scored(hand.trajectory(hand.segment((1,), ((), (4,))), index=1), 0.0)
    group = ScoredGroup(task=hand.task(), scored=(long, short))
    weighing = Weighing(aggregation=aggregation, length_unit=8)
    episodes = valid_episodes([group], min_valid_frac=0.0)
    samples = assign_credit(episodes, GRPO, weighing, scores={}, shaping=Shaping(), permute_key=None).samples
    assert [(sample.token_weight, sample.token_mass) for sample in samples] == expected
    num_episodes = sum(sample.mass for sample in samples)
    assert num_episodes == pytest.approx(6 if aggregation is Aggregation.token_mean else 2)


def test_a_kl_penalty_in_the_reward_comes_before_the_baseline_summed_over_all_segments(hand):
    twice = hand.segment((1,), ((), (5, 6))), hand.segment((1, 2), ((), (7,)))
    scored = (hand.scored(hand.trajectory(*twice), 1.0), hand.scored(hand.trajectory(twice[0], index=1), 1.0))
    group = ScoredGroup(task=hand.task(), scored=scored)
    episodes = valid_episodes([group], min_valid_frac=0.0)
    d = {"0000/0000/0": [0.5, -0.25], "0000/0000/1": [1.0], "0000/0001/0": [0.0, 0.25]}
    scores = {
        key: SampleScores(
            proximal_logprobs_R=np.array(values, np.float32), reference_logprobs_R=np.zeros(len(values), np.float32)
        )
        for key, values in d.items()
    }
    shaping = Shaping(kl=KlReward(coef=0.5, estimator=KlEstimator.k1))
    arguments = {"scores": scores, "shaping": shaping, "permute_key": None}
    credit = assign_credit(episodes, GRPO, OVER_TOKENS, **arguments)
    # Penalties of 0.5 (0.5 - 0.25 + 1) = 0.625 and 0.125: their mean is 0.375, and equal rewards do differ.
    assert advantage_of(credit) == [-0.25, -0.25, 0.25]
    assert credit.no_variance_frac == 0.0
    assert all(sample.scores is scores[sample.key] for sample in credit.samples)
    with pytest.raises(ScoresError, match=r"^sample 0000/0000/0: its credit needs the learner's scores, got none; "):
        assign_credit(episodes, GRPO, OVER_TOKENS, **(arguments | {"scores": {}}))
    bare = {key: SampleScores(proximal_logprobs_R=one.proximal_logprobs_R) for key, one in scores.items()}
    with pytest.raises(ScoresError, match=r"^algorithm\.kl_in: reward needs the reference's logprobs, got scores "):
        assign_credit(episodes, GRPO, OVER_TOKENS, **(arguments | {"scores": bare}))


def test_the_longest_answer_is_punished_before_the_baseline(hand):
    """Limit 5, buffer 4: 1 token is free, 3 cost a half, 5 cost all; the episode's longest answer counts."""
    free = hand.scored(hand.trajectory(hand.segment((1,), ((), (5,)), ((9, 9, 9), (6,)))), 1.0)
    half = hand.scored(hand.trajectory(hand.segment((1,), ((), (5,)), ((), (6, 7, 8))), index=1), 1.0)
    whole = hand.scored(hand.trajectory(hand.segment((1,), ((), (1, 2, 3, 4, 5))), index=2), 0.0)
    assert [turn_lengths(each.trajectory) for each in (free, half, whole)] == [[1, 1], [1, 3], [5]]
    group = ScoredGroup(task=hand.task(), scored=(free, half, whole))
    shaping = Shaping(overlong=Overlong(limit=5, buffer=4, coef=0.5))
    credit = assign_credit(
        valid_episodes([group], min_valid_frac=0.0), GRPO, OVER_TOKENS, scores={}, shaping=shaping, permute_key=None
    )
    rewards = np.array([1.0, 0.75, -0.5])
    np.testing.assert_allclose(advantage_of(credit), rewards - rewards.mean(), rtol=1e-6)


def test_whether_a_group_has_variance_is_what_credit_finds(hand):
    shaping = Shaping(overlong=Overlong(limit=2, buffer=1, coef=1.0))
    assert has_variance(hand.group(0.0, 1.0), shaping)
    for flat in (hand.group(1.0, 1.0), hand.group("x", 1.0), hand.group("x", "x"), hand.group(0.5)):
        assert not has_variance(flat, shaping)
    short = hand.scored(hand.trajectory(hand.segment((1,), ((), (5,)))), 1.0)
    long = hand.scored(hand.trajectory(hand.segment((1,), ((), (5, 6))), index=1), 1.0)
    group = ScoredGroup(task=hand.task(), scored=(short, long))
    assert has_variance(group, shaping)
    assert not has_variance(group, Shaping())


LEFT_TO_RIGHT = Ppo(
    clip=Clip(0.2, 0.2), gamma=1.0, gae_lambda=1.0, credit=CreditStep.token, whiten=False, value_coef=1.0,
    value_clip=0.0,
)  # fmt: skip
"""Of value 0, the advantage of a token is the sum of the rewards from it on."""


def valued(episodes: Episodes, value: float = 0.0) -> dict[str, SampleScores]:
    def of(sample: TrainSample) -> SampleScores:
        count = len(sample.targets_R)
        zeros_R = np.zeros(count, np.float32)
        return SampleScores(
            proximal_logprobs_R=zeros_R,
            reference_logprobs_R=zeros_R - np.float32(0.5),
            values_R=np.full(count, value, np.float32),
        )

    return {sample.key: of(sample) for sample in episodes.samples}


def token_credit_of(
    group: ScoredGroup,
    *,
    value: float = 0.0,
    shaping: Shaping | None = None,
    permute_key: tuple[int, ...] | None = None,
) -> Credit:
    episodes = valid_episodes([group], min_valid_frac=0.0)
    return assign_credit(
        episodes, LEFT_TO_RIGHT, OVER_TOKENS, scores=valued(episodes, value), shaping=shaping or Shaping(),
        permute_key=permute_key,
    )  # fmt: skip


def advantages(credit: Credit) -> list[list[float]]:
    return [sample.advantages_R.tolist() for sample in credit.samples]


def two_turns(hand, num_observed: int) -> ScoredGroup:
    """Turn 0 says two tokens and earns 0.25, turn 1 says one and earns 1; the root is their sum."""
    segment = hand.segment((1,), ((), (5, 6)), (range(num_observed), (7,)))
    parts = RewardNode(name="first", score=0.25, turn=0), RewardNode(name="last", score=1.0)
    return ScoredGroup(task=hand.task(), scored=(hand.scored(hand.trajectory(segment), 1.25, *parts),))


@pytest.mark.parametrize("num_observed", [1, 200])
def test_a_turns_reward_is_at_its_last_token_and_a_long_observation_costs_no_credit(hand, num_observed: int):
    (sample,) = token_credit_of(two_turns(hand, num_observed)).samples
    assert sample.num_tokens == 4 + num_observed
    assert sample.advantages_R.tolist() == [1.25, 1.25, 1.0]
    assert sample.trained
    assert sample.returns_R is not None
    assert sample.returns_R.tolist() == [1.25, 1.25, 1.0]
    (sample,) = token_credit_of(two_turns(hand, num_observed), value=0.5).samples
    assert sample.advantages_R.tolist() == [0.75, 0.75, 0.5]  # the return less the value, lambda 1


def test_credit_runs_over_all_segments_of_an_episode(hand):
    segments = hand.segment((1,), ((), (5, 6))), hand.segment((1, 2), ((), (7,)), ((9,), (8,)))
    parts = RewardNode(name="a", score=0.5, turn=0), RewardNode(name="b", score=2.0, turn=1)
    group = ScoredGroup(task=hand.task(), scored=(hand.scored(hand.trajectory(*segments), 2.5, *parts),))
    assert advantages(token_credit_of(group)) == [[2.5, 2.5], [2.0, 0.0]]


def test_a_turn_without_a_token_gives_its_reward_to_the_last_one_before(hand):
    segment = hand.segment((1,), ((), ()), ((), (5, 6)), ((9,), ()), ((), (7,)))
    parts = [RewardNode(name=str(turn), score=2.0**turn, turn=turn) for turn in range(4)]
    group = ScoredGroup(task=hand.task(), scored=(hand.scored(hand.trajectory(segment), 15.0, *parts),))
    assert advantages(token_credit_of(group)) == [[15.0, 14.0, 8.0]]  # turn 0: nothing before it, so the first


def test_an_episode_of_equal_reward_still_teaches_a_critic_and_a_masked_one_does_not(hand):
    credit = token_credit_of(hand.group(1.0, "sandbox: lost", 1.0))
    assert first_said(credit) == [20, 22]
    assert advantages(credit) == [[1.0, 1.0], [1.0, 1.0]]
    assert (credit.num_masked, credit.no_variance_frac, credit.explained_variance) == (1, 0.0, None)
    assert token_credit_of(hand.group(1.0, 0.0), value=0.5).explained_variance == pytest.approx(0.0)


def test_shaping_of_tokens_sums_to_that_of_the_episode(hand):
    """KL penalties of 0.5 x 0.5 a token; the longest answer, of 2 tokens of limit 2, is punished at its end."""
    shaping = Shaping(kl=KlReward(coef=0.5, estimator=KlEstimator.k1), overlong=Overlong(limit=2, buffer=1, coef=1.0))
    group = two_turns(hand, 3)
    credit = token_credit_of(group, shaping=shaping)
    assert advantages(credit) == [[-0.5, -0.25, 0.75]]
    episodes = valid_episodes([group], min_valid_frac=0.0)
    ((episode,),) = episodes.with_scores(valued(episodes)).groups
    assert shaping.episode_reward(episode) == pytest.approx(1.25 - 1.0 - 0.75)


def test_permuted_rewards_of_a_critic_are_whole_totals_at_the_end(hand):
    group = hand.group(*(float(i) for i in range(6)))
    credit = token_credit_of(group, permute_key=(0, 1))
    drawn = [row[0] for row in advantages(credit)]
    assert all(row == [row[0]] * 2 for row in advantages(credit))
    assert sorted(drawn) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert drawn != sorted(drawn)


def test_a_critics_credit_without_values_is_named(hand):
    episodes = valid_episodes([hand.group(1.0)], min_valid_frac=0.0)
    bare = {key: replace(one, values_R=None) for key, one in valued(episodes).items()}
    with pytest.raises(ScoresError, match=r"^sample 0000/0000/0: its credit needs the values of a critic, got scores"):
        assign_credit(episodes, LEFT_TO_RIGHT, OVER_TOKENS, scores=bare, shaping=Shaping(), permute_key=None)
