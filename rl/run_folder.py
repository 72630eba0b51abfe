"""The folder of a run: who owns it, what it was started with, how far it is, and what may change when it goes on.

    runs/<run.name>/config.yaml   the resolved configuration
                    run.json      state, rounds done, commit and changes of every start (written atomically)
                    owner.json    the process that is running it
                    result.json   the result (`RunResult`), when finished
                    failure.txt   the traceback of the last failure

The same command again goes on with an unfinished run and shows the result of a finished one. More `run.rounds` continue
either; any other change that would make it another run is refused by name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import json
import os
import shutil
import subprocess
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import yaml

from rl.config import RunConfig
from rl.config_check import ConfigError, dataclass_default, flatten
from rl.machine import ProcessIdentity, current_process

FREE_TO_CHANGE: Final = frozenset(
    {
        "run.name",
        "run.root",
        "run.eval_every",
        "run.checkpoint_every",
        "run.keep_checkpoints",
        "run.max_restarts",
        "evaluation.num_report_episodes",
        "warm_start.cache",
        "warm_start.checkpoint_every",
        "rollout.num_workers",
        "rollout.threads_per_worker",
        "rollout.kv_memory_mb",
        "rollout.max_retries",
        "rollout.round_deadline_s",
        "learner.num_ranks",
        "learner.expert_parallel",
        "learner.zero_stage",
        "learner.activation_checkpointing",
        "learner.num_threads",
        "learner.call_deadline_s",
        "learner.keep_memory",
        "learner.offload_optimizer",
        "learner.quantization.warn_still_rounds",
        "learner.placement.kind",
        "learner.placement.ranks_per_node",
        "learner.placement.traffic_weight",
        "learner.placement.load_file",
        "env.sandboxes_per_worker",
    }
)
"""Keys that say how and where a run is carried out, not what it computes."""

_FREE_SECTIONS: Final = ("cluster.", "logging.", "parity.")
_ROUNDS: Final = "run.rounds"
_UNKNOWN: Final = object()
_TEMP_PREFIX: Final = "rl-"
_TEMP_ROOT: Final = Path("/tmp")  # AF_UNIX paths hold 107 bytes, and Ray appends some 60 of them


class RunState(StrEnum):
    """How far a run is. A run whose owner died without a word stays `RUNNING`; the next start sees the dead owner."""

    RUNNING = "running"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a finished run has to show. Rates are fractions of the held-out tasks solved with greedy decoding."""

    rounds: int
    held_out_before: float
    held_out_after: float
    reward_first: float
    reward_last: float
    minutes: float


def plain(node: Any) -> Any:
    """A configuration as YAML and JSON hold it: enums by name."""
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return {field.name: plain(getattr(node, field.name)) for field in dataclasses.fields(node)}
    if isinstance(node, Enum):
        return node.name
    if isinstance(node, Mapping):
        return {str(key): plain(value) for key, value in node.items()}
    return [plain(value) for value in node] if isinstance(node, list | tuple) else node


def write_atomically(path: Path, text: str) -> None:
    """Replace a file so that a reader, and a crash, sees the old text or the new one whole."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


@functools.cache
def commit() -> tuple[str, bool]:
    """The commit of this checkout when first asked, and whether files differ; ("unknown", False) outside of git."""

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(Path(__file__).resolve().parent), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    head = git("rev-parse", "HEAD")
    return ("unknown", False) if head is None else (head, bool(git("status", "--porcelain")))


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(
            f"{path}: cannot be read, got {error}; delete the run's folder or choose another run.name"
        ) from error
    return content


def _read_owner(path: Path) -> ProcessIdentity | None:
    """Who `path` says owns its folder; `None` without one (also for half a file of a crashed start)."""
    try:
        return ProcessIdentity(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _write_owner(path: Path) -> None:
    write_atomically(path, json.dumps(dataclasses.asdict(current_process())))


class RunFolder:
    """A run's folder, owned by this process from `open` until the end of its `with` block."""

    def __init__(self, path: Path, config: RunConfig, record: dict[str, Any], lock: int) -> None:
        self.path = path
        self.config = config
        self._record = record
        self._lock = lock

    @classmethod
    def open(cls, config: RunConfig) -> RunFolder:
        """Take the folder of `config`, new or existing. It is left untouched when it cannot be used.

        Raises:
            ConfigError: a live process owns it, or the configuration differs in a key that makes it another run.
        """
        path = Path(config.run.root) / config.run.name
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = _take(path)
        except OSError as error:
            raise ConfigError(
                f"run.root: {path} cannot be written, got {error.strerror}; name another run.root"
            ) from error
        try:
            record = _read_json(path / "run.json")
            changes = {} if record is None else compare(path, config, int(record["rounds_done"]))
            folder = cls(path, config, record or _new_record(), lock)
            if not folder.is_finished:
                folder._start(changes)
        except BaseException:
            _release(path, lock)
            raise
        return folder

    @property
    def state(self) -> RunState:
        """The state on disk."""
        return RunState(self._record["state"])

    @property
    def rounds_done(self) -> int:
        """Rounds that `record_round` has seen, over all starts."""
        return int(self._record["rounds_done"])

    @property
    def is_resumed(self) -> bool:
        """Whether an earlier start exists: look for a checkpoint."""
        return len(self._record["starts"]) > 1

    @property
    def is_finished(self) -> bool:
        """Whether there is nothing left to do for this configuration."""
        return self.state is RunState.FINISHED and self.rounds_done >= self.config.run.rounds

    def record_round(self, rounds_done: int) -> None:
        """Note that so many rounds are complete."""
        self._update(rounds_done=rounds_done)

    def finish(self, result: RunResult) -> None:
        """Write the result and mark the run finished."""
        write_atomically(self.path / "result.json", json.dumps(dataclasses.asdict(result), indent=2) + "\n")
        (self.path / "failure.txt").unlink(missing_ok=True)
        self._update(state=RunState.FINISHED, rounds_done=self.config.run.rounds)

    def fail(self, error: BaseException) -> None:
        """Mark the run failed, and keep the traceback in failure.txt."""
        write_atomically(self.path / "failure.txt", "".join(traceback.format_exception(error)))
        self._update(state=RunState.FAILED, error=" ".join(str(error).split())[:500] or type(error).__name__)

    def interrupt(self) -> None:
        """Mark the run interrupted: the same command goes on with it."""
        self._update(state=RunState.INTERRUPTED)

    def close(self) -> None:
        """Give the folder up. Idempotent."""
        if self._lock >= 0:
            _release(self.path, self._lock)
            self._lock = -1

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if self.state is RunState.RUNNING:
                if error is None or not isinstance(error, Exception):
                    self.interrupt()  # Ctrl-C, a signal's SystemExit, or a block left without `finish`
                else:
                    self.fail(error)
        finally:
            self.close()

    def result(self) -> RunResult | None:
        """The result of a finished run."""
        return read_result(self.path)

    def finished_lines(self) -> list[str]:
        """What to tell someone who starts a finished run again: its result and the two ways on."""
        name, rounds = self.config.run.name, self.rounds_done
        is_job = "/" in name  # of a sweep: its name is not the user's to choose
        lines = [f"{self.path}: finished, {rounds} rounds"]
        if (result := self.result()) is not None:
            lines.append(
                f"held-out {result.held_out_before:.1%} -> {result.held_out_after:.1%}, reward "
                f"{result.reward_first:.3f} -> {result.reward_last:.3f}, {result.minutes:.1f} minutes"
            )
        if not is_job:
            lines.append(f"more rounds:  run.rounds={rounds + 10} (the learning rate then falls over all of them)")
            lines.append(f"another run:  run.name={name}-2")
        return lines

    def _start(self, changes: dict[str, list[Any]]) -> None:
        write_atomically(self.path / "config.yaml", yaml.safe_dump(plain(self.config), sort_keys=False))
        head, dirty = commit()
        start = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "commit": head, "dirty": dirty, "changes": changes}
        self._update(state=RunState.RUNNING, error=None, starts=[*self._record["starts"], start])

    def _update(self, **changes: Any) -> None:
        self._record |= changes
        write_atomically(self.path / "run.json", json.dumps(self._record, indent=2) + "\n")


def _new_record() -> dict[str, Any]:
    return {"state": RunState.RUNNING, "rounds_done": 0, "error": None, "starts": []}


def read_state(path: Path) -> dict[str, Any] | None:
    """The run.json of a run's folder, or `None` when no run has started there."""
    return _read_json(path / "run.json")


def read_result(path: Path) -> RunResult | None:
    """The result.json of a run's folder, or `None` when there is none yet."""
    content = _read_json(path / "result.json")
    if content is None:
        return None
    return RunResult(**{field.name: content[field.name] for field in dataclasses.fields(RunResult)})


def _take(path: Path) -> int:
    """Own the folder: the file lock where the file system has one, the owner's record where it has not.

    The lock falls with the process. The record names the owner, and decides when a leftover child still holds the lock.
    """
    lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        locked = True
    except OSError:
        locked = False
    owner = _read_owner(path / "owner.json")
    alive = None if owner is None else owner.is_alive()
    if alive or (alive is None and not locked):
        os.close(lock)
        by = "another process" if owner is None else f"process {owner.pid} on {owner.host}"
        raise ConfigError(
            f"run.name: {path} is being run already, got its owner {by}; wait for it, stop it, or choose another "
            "run.name"
        )
    _write_owner(path / "owner.json")
    return lock


def _release(path: Path, lock: int) -> None:
    (path / "owner.json").unlink(missing_ok=True)
    os.close(lock)


def compare(path: Path, config: RunConfig, rounds_done: int) -> dict[str, list[Any]]:
    """Changes against the folder's configuration, as key: [then, now].

    A key that was unknown then stood for its dataclass's default: what today's conf/ composes came later.

    Raises:
        ConfigError: a change that would make it another run, by name and with both values.
    """
    try:
        stored = yaml.safe_load((path / "config.yaml").read_text())
    except FileNotFoundError:
        return {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path / 'config.yaml'}: must be the run's configuration, got {' '.join(str(error).split())[:80]}; "
            "restore it, or choose another run.name"
        ) from error
    changes, unknown = dict[str, list[Any]](), set[str]()
    for key, value in flatten(config).items():
        then, now = _stored_value(stored, key), plain(value)
        if then is _UNKNOWN:
            then = plain(dataclass_default(key))
            unknown.add(key)
        if then != now:
            changes[key] = [then, now]
    for key, (then, now) in changes.items():
        if key in FREE_TO_CHANGE or key.startswith(_FREE_SECTIONS):
            continue
        if key == _ROUNDS:
            if now < rounds_done:
                raise ConfigError(
                    f"{key}: {path} has done {rounds_done} rounds already, got {now}; ask for more, or choose another "
                    "run.name"
                )
            continue
        started = f"without this key, which meant {then}" if key in unknown else f"with {then}"
        raise ConfigError(
            f"{key}: {path} was started {started}, got {now}; put it back to go on with that run, or choose another "
            "run.name for a new one"
        )
    return changes


def _stored_value(stored: Any, key: str) -> Any:
    node = stored
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            return _UNKNOWN
        node = node[part]
    return node


def short_temp_folder(prefix: str = _TEMP_PREFIX) -> Path:
    """A new private folder with a short name for sockets (Ray's `_temp_dir`), marked as this process's own.

    It is the caller's to remove; what a killed process leaves is removed by `remove_dead_folders`.
    """
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=_TEMP_ROOT))
    _write_owner(path / "owner.json")
    return path


def dead_folders(root: Path = _TEMP_ROOT, prefix: str = _TEMP_PREFIX) -> Iterator[Path]:
    """Temporary folders of this user whose owner is certainly dead."""
    for path in root.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # another process may be removing it
            if path.is_symlink() or not path.is_dir() or path.stat().st_uid != os.getuid():
                continue
            owner = _read_owner(path / "owner.json")
            if owner is not None and owner.is_alive() is False:
                yield path


def remove_dead_folders(root: Path = _TEMP_ROOT, prefix: str = _TEMP_PREFIX) -> list[Path]:
    """Remove what killed runs left behind, and say what was removed."""
    removed = list(dead_folders(root, prefix))
    for path in removed:
        shutil.rmtree(path, ignore_errors=True)
    return removed
