"""Small environments, and a policy for them, for tests of the worker and the pool; workers import them by name."""

import os
import time
from pathlib import Path

import torch

from envs.base import SandboxLost
from envs.config import EnvConfig
from envs.custom import TextEnv, question
from model.config import ModelConfig
from model.snapshot import make_snapshot, published_view
from model.transformer import EMBEDDING, LM_HEAD, Transformer, init_weights
from rollout.config import ChatFormat
from rollout.tokenizer import Control, train_tokenizer
from rollout.types import Checks, WeightVersion
from rollout.worker import WorkerSpec

TOKENIZER = train_tokenizer([], vocab_size=262)
MODEL = ModelConfig(
    vocab_size=262,
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    expert_hidden_size=32,
    tie_embeddings=False,
)


def snapshot(version, seed=0):
    """Weights of a policy that babbles, and ends its answer with a chance of about a third a token."""
    model = Transformer(MODEL)
    init_weights(model, seed)
    with torch.no_grad():
        model.get_parameter(EMBEDDING)[:, 0] = 3.0  # a component that every token shares ...
        model.get_parameter(LM_HEAD)[:, 0] = 0.0
        model.get_parameter(LM_HEAD)[TOKENIZER.token_to_id(Control.END), 0] = 1.0  # ... and that speaks for the end
    return make_snapshot(WeightVersion(version), published_view(model.state_dict()))


def spec(env, *, max_sessions=16, max_retries=0, **params):
    """A worker for one of the environments below."""
    return WorkerSpec(
        env=EnvConfig(name="custom", target=f"{__name__}:{env.__name__}", params=params, max_context_tokens=96),
        model=MODEL,
        tokenizer_json=TOKENIZER.to_str(),
        chat_format=ChatFormat.native,
        num_threads=1,
        max_sessions=max_sessions,
        max_retries=max_retries,
    )


class Parrot(TextEnv):
    """Two turns; replies and grade follow from what was said, so a mixed-up trajectory shows."""

    def tasks(self):
        return [question(f"task {number}", f"Say {number}.", number=number) for number in range(8)]

    def reply(self, task, answers):
        return f"{task.payload['number']} heard {len(answers[0])}" if len(answers) == 1 else None

    def grade(self, task, answers):
        return Checks(passed=len(answers[0]) % 5, declared=5)

    def solve(self, task):
        return (f"first {task.payload['number']}", "second")


TASKS = Parrot().tasks()


class Flaky(Parrot):
    """Loses the first `breaks` attempts of odd tasks (counted in this process)."""

    attempts: dict[str, int] = {}  # noqa: RUF012

    def __init__(self, breaks: int):
        self._breaks = breaks

    async def reset(self, task):
        attempt = Flaky.attempts[task.id] = Flaky.attempts.get(task.id, 0) + 1
        if task.payload["number"] % 2 and attempt <= self._breaks:
            raise SandboxLost(f"lost in attempt {attempt}")
        return await super().reset(task)


class Unmakeable(Parrot):
    """Every third can be made, the first among them."""

    made = 0

    def __init__(self):
        Unmakeable.made += 1
        if Unmakeable.made % 3 != 1:
            raise ConnectionError("no service at the door")


class NeverMade(Parrot):
    """Cannot be made at all."""

    def __init__(self):
        raise ConnectionError("no service at the door")


class Waiting(Parrot):
    """Says in a folder which process runs it, and waits there until it may go on."""

    def __init__(self, folder: str):
        self._folder = Path(folder)

    async def reset(self, task):
        (self._folder / str(os.getpid())).touch()
        while not (self._folder / "go").exists():
            time.sleep(0.02)
        return await super().reset(task)
