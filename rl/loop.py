"""The round.

    ROLLOUT  tasks             -> trajectories      rollout.pool, rollout.episode
    REWARD   trajectories      -> judged groups     rewards
    PARITY   samples           -> gate and scores   rl.parity
    CREDIT   rewards, scores   -> training samples  rl.advantage, rl.algorithms
    UPDATE   training samples  -> new masters       rl.learner
    PUBLISH  masters           -> next version      rl.publish

Every stage is a function of the round's number and of what came before it, so a resumed run repeats a round exactly.
With `algorithm.max_resample_rounds`, groups without variance are followed by groups of further tasks (dynamic sampling,
`rl.algorithms.dapo`); all of them are judged, compared and counted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rewards.base import Reward, score_group
from rl.advantage import Weighing, assign_credit, has_variance
from rl.algorithms.base import Algorithm, CriticAlgorithm, Loss
from rl.batch import TrainSample
from rl.checkpoint import Checkpoints, RunState
from rl.config import RunConfig
from rl.episodes import valid_episodes
from rl.evaluate import Evaluation, Evaluator
from rl.learner.group import LearnerGroup
from rl.publish import Publisher
from rl.recorder import Recorder, RoundFacts
from rl.rollouts import Rollouts
from rl.shaping import Shaping
from rollout.types import ScoredGroup, WeightVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of a run, put together by `rl.build`.

    `algorithm` and `shaping` decide the credit of an episode, `loss` and `weighing` what the learner minimises.
    `companions` are the files that travel with its model: tokenizer, chat template, defaults of generation.
    """

    config: RunConfig
    rollouts: Rollouts
    reward: Reward
    algorithm: Algorithm | CriticAlgorithm
    shaping: Shaping
    loss: Loss
    weighing: Weighing
    learners: LearnerGroup
    publisher: Publisher
    evaluator: Evaluator
    checkpoints: Checkpoints
    recorder: Recorder
    companions: Mapping[str, bytes]
    wandb_id: str
    on_round: Callable[[int], None]
    should_stop: Callable[[], bool]

    def save(self, number: int) -> None:
        """Write the checkpoint from which round `number + 1` starts; it is a whole model folder too."""

        def write(folder: Path) -> None:
            self.learners.save(folder.resolve())
            self.publisher.save(folder)
            for name, content in self.companions.items():
                (folder / name).write_bytes(content)

        state = RunState(
            next_round=number + 1,
            data_cursor=self.rollouts.cursor,
            weight_version=self.publisher.version,
            seed=self.config.run.seed,
            wandb_id=self.wandb_id,
        )
        self.checkpoints.save(state, write)


def train(parts: Parts, first_round: int) -> list[Evaluation]:
    """Rounds `first_round` to the last; returns after a round when asked to stop.

    The result is the evaluation that belongs to the last round it did; the one after the very last round is full.
    """
    config, stage = parts.config, parts.recorder.stage
    evaluations: list[Evaluation] = []
    for number in range(first_round, config.run.rounds + 1):
        judged = _judged_groups(parts, number)
        with stage("parity"):
            episodes = valid_episodes(judged, min_valid_frac=config.rollout.min_valid_frac)
            parity = parts.publisher.check_parity(episodes.samples)
        with stage("credit"):
            credit = assign_credit(
                episodes,
                parts.algorithm,
                parts.weighing,
                scores=parity.scores,
                shaping=parts.shaping,
                permute_key=(config.run.seed, number) if config.run.permute_rewards else None,
            )
        with stage("update"):
            lr = learning_rate(config, number)
            update = parts.learners.update(minibatches(config, number, credit.samples), parts.loss, lr)
        learner_version = parts.publisher.version
        with stage("publish"):
            published = parts.publisher.publish(WeightVersion(learner_version + 1))
        with stage("evaluate"):
            evaluations = _evaluate_if_due(parts, number)
        parts.recorder.record(
            number,
            RoundFacts(
                groups=judged,
                credit=credit,
                parity=parity,
                update=update,
                published=published,
                lr=lr,
                learner_version=learner_version,
                load_balance_coef=config.algorithm.load_balance_coef,
                router_z_coef=config.algorithm.router_z_coef,
                num_resampled=len(judged) - config.rollout.prompts_per_round,
                punishments=[parts.shaping.punishment(s.trajectory) for group in judged for s in group.scored],
            ),
            evaluations,
        )
        stopping = parts.should_stop()
        with stage("checkpoint"):
            if stopping or number % config.run.checkpoint_every == 0 or number == config.run.rounds:
                parts.save(number)
        parts.on_round(number)
        if stopping:
            break
    return evaluations


def _judged_groups(parts: Parts, number: int) -> list[ScoredGroup]:
    """ROLLOUT and REWARD: the groups of a round, and one more for each without variance, within the bound."""
    stage, judged = parts.recorder.stage, list[ScoredGroup]()
    wanted = parts.config.rollout.prompts_per_round
    for attempt in range(1 + parts.config.algorithm.max_resample_rounds):
        with stage("rollout"):
            groups = parts.rollouts.collect(number, attempt=attempt, num_tasks=wanted)
        with stage("reward"):
            fresh = [score_group(parts.reward, group) for group in groups]
        judged += fresh
        wanted = sum(not has_variance(group, parts.shaping) for group in fresh)
        if not wanted:
            break
    return judged


def learning_rate(config: RunConfig, number: int) -> float:
    """The learning rate of round `number`: it falls linearly to `lr_end_frac` of itself over the run."""
    return config.algorithm.lr * max(config.algorithm.lr_end_frac, 1 - (number - 1) / config.run.rounds)


def minibatches(config: RunConfig, number: int, samples: Sequence[TrainSample]) -> list[list[TrainSample]]:
    """The trained samples of a round in `num_minibatches` random parts, each sample once."""
    trained = [sample for sample in samples if sample.trained]
    random.Random(f"{config.run.seed}/{number}").shuffle(trained)
    count = config.algorithm.num_minibatches
    return [trained[part::count] for part in range(count)]


def _evaluate_if_due(parts: Parts, number: int) -> list[Evaluation]:
    """Held-out evaluation after round `number`: brief during the run, full after the last round."""
    run = parts.config.run
    if number != run.rounds and number % run.eval_every:
        return []
    with parts.publisher.newest():
        return parts.evaluator.full() if number == run.rounds else parts.evaluator.brief()
