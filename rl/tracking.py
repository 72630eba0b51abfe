"""Weights & Biases beside the metrics log: the same values, online or offline, under the run's folder.

The mode is resolved once and logged with its reason. Once a run is open, tracking is a boundary: what W&B cannot do
(disk full, network gone, its service killed) is warned about once and tracking stops; training goes on, because
`metrics.jsonl` is the record of the run.

The run id comes from the caller, who keeps it in the checkpoint: a resumed run continues the same W&B run. Offline, a
resume opens a second `offline-run-*` folder with the same id; `wandb sync` merges the two, row by row, because the W&B
step is the round.
"""

from __future__ import annotations

import logging
import netrc
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

logger = logging.getLogger(__name__)

_HOST = "api.wandb.ai"
_ENVIRONMENT_FOLDERS = {"WANDB_CACHE_DIR": "wandb/cache", "WANDB_DATA_DIR": "wandb/data"}


class TrackingError(ValueError):
    """W&B cannot be used as asked, found before the run starts."""


class TrackingMode(StrEnum):
    """Where tracked values go."""

    ONLINE = "online"
    OFFLINE = "offline"
    DISABLED = "disabled"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackingChoice:
    """A resolved mode and why it was chosen, as a clause for the log."""

    mode: TrackingMode
    reason: str


def new_run_id() -> str:
    """A fresh W&B run id; keep it in the checkpoint."""
    return secrets.token_hex(4)


def resolve_mode(requested: str, environ: Mapping[str, str] = os.environ) -> TrackingChoice:
    """What `logging.wandb` means on this machine.

    `auto` follows `WANDB_MODE` where it is set, else it is online exactly when there is an API key (`WANDB_API_KEY`, or
    an entry for the W&B host in netrc).

    Raises:
        TrackingError: an unknown mode, or online without a key.
    """
    if requested == "auto":
        wanted = environ.get("WANDB_MODE", "")
        if wanted in (TrackingMode.OFFLINE, TrackingMode.DISABLED):
            return TrackingChoice(mode=TrackingMode(wanted), reason=f"WANDB_MODE={wanted} is set")
        key, reason = _find_key(environ)
        return TrackingChoice(mode=TrackingMode.ONLINE if key else TrackingMode.OFFLINE, reason=reason)
    if requested not in tuple(TrackingMode):
        modes = ", ".join(("auto", *TrackingMode))
        raise TrackingError(f"logging.wandb: unknown mode, got {requested}; choose one of {modes}")
    if requested == TrackingMode.ONLINE:
        key, reason = _find_key(environ)
        if not key:
            raise TrackingError(
                f"logging.wandb: online needs an API key, got none ({reason}); "
                "set WANDB_API_KEY or use logging.wandb=offline"
            )
    return TrackingChoice(mode=TrackingMode(requested), reason=f"logging.wandb={requested} is set")


def _find_key(environ: Mapping[str, str]) -> tuple[bool, str]:
    """Whether an API key is at hand, and a clause that says where or why not. The key itself is never read out."""
    if environ.get("WANDB_API_KEY"):
        return True, "WANDB_API_KEY is set"
    host = urlsplit(environ.get("WANDB_BASE_URL", "")).hostname or _HOST
    file = Path(environ.get("NETRC") or Path(environ.get("HOME") or Path.home()) / ".netrc")
    if not file.is_file():
        return False, "no WANDB_API_KEY and no netrc file"
    try:
        found = netrc.netrc(file).hosts.get(host)
    except (netrc.NetrcParseError, OSError) as error:
        return False, f"no WANDB_API_KEY, and the netrc file cannot be read: {error}"
    if found is None:
        return False, f"no WANDB_API_KEY and no entry for {host} in netrc"
    return True, f"netrc has an entry for {host}"


class Tracker:
    """One W&B run. Use it as a context manager, so that it is finished with the right exit code in every case.

    A second `Tracker` in the same process (a Hydra multirun) is a new run. Console output is not captured.

    Raises:
        TrackingError: the run cannot be opened (key refused, no network).
    """

    def __init__(
        self,
        run_folder: Path,
        choice: TrackingChoice,
        *,
        project: str,
        run_id: str,
        name: str,
        config: Mapping[str, Any],
        tags: Sequence[str] = (),
    ) -> None:
        self.choice = choice
        self._run: Any = None
        self._failures: tuple[type[BaseException], ...] = (OSError,)
        self._restore: dict[str, str | None] = {}
        logger.info("wandb: %s, because %s", choice.mode, choice.reason)
        if choice.mode is not TrackingMode.DISABLED:
            self._open(run_folder, project=project, run_id=run_id, name=name, config=config, tags=tags)

    @property
    def is_active(self) -> bool:
        """Whether values still go to W&B."""
        return self._run is not None

    def _open(
        self,
        run_folder: Path,
        *,
        project: str,
        run_id: str,
        name: str,
        config: Mapping[str, Any],
        tags: Sequence[str],
    ) -> None:
        run_folder.mkdir(parents=True, exist_ok=True)
        for variable, folder in _ENVIRONMENT_FOLDERS.items():
            self._restore[variable] = os.environ.get(variable)
            os.environ.setdefault(variable, str((run_folder / folder).absolute()))
        import wandb

        self._failures = (wandb.Error, OSError)
        self._wandb = wandb
        try:
            self._run = wandb.init(
                project=project,
                id=run_id,
                name=name,
                config=dict(config),
                tags=list(tags),
                dir=str(run_folder),
                mode=self.choice.mode.value,
                resume="allow",
                reinit="create_new",
                settings=_settings(wandb),
            )
            self._run.define_metric("round")
            self._run.define_metric("*", step_metric="round")
        except self._failures as error:
            self._restore_environment()
            raise TrackingError(
                f"logging.wandb: the {self.choice.mode} run could not be opened, got {type(error).__name__}: {error}; "
                "check the key and the network, or use logging.wandb=offline"
            ) from error

    def log(self, round: int, values: Mapping[str, float | None]) -> None:
        """The values of one round, at once; call it once a round. Values that are `None` are left out."""
        row = {name: value for name, value in values.items() if value is not None}
        self._guarded("log", lambda run: run.log({"round": round, **row}, step=round, commit=True))

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[str | float | None]]) -> None:
        """A table in the run's summary, such as `episodes/before`; the same name again replaces it."""

        def put(run: Any) -> None:
            run.summary[name] = self._wandb.Table(columns=list(columns), data=[list(row) for row in rows])

        self._guarded("table", put)

    def finish(self, exit_code: int = 0) -> None:
        """Close the run; any code but 0 marks it as failed. Safe to call twice."""
        self._guarded("finish", lambda run: run.finish(exit_code=exit_code))
        self._run = None
        self._restore_environment()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish(exit_code=_exit_code(error))

    def _guarded(self, what: str, call: Callable[[Any], None]) -> None:
        """The tracking boundary: a failure of W&B or of its disk ends tracking, not training."""
        if self._run is None:
            return
        try:
            call(self._run)
        except self._failures as error:
            self._run = None
            logger.warning(
                "wandb: %s failed, got %s: %s; tracking stops here, training goes on and metrics.jsonl is complete",
                what,
                type(error).__name__,
                error,
            )

    def _restore_environment(self) -> None:
        for variable, value in self._restore.items():
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value
        self._restore.clear()


def _exit_code(error: BaseException | None) -> int:
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _settings(wandb: Any) -> Any:
    wanted = {
        "console": "off",
        "silent": True,
        "init_timeout": 60.0,
        "finish_timeout": 120.0,
        "finish_timeout_raises": True,
        "save_code": False,
        "disable_git": True,
        "x_disable_stats": True,
        "x_disable_meta": True,
        "x_save_requirements": False,
        # The default keeps up to 15 s of rows in memory, which a kill -9 would lose.
        "x_transaction_log_flush_interval": 1.0,
    }
    # The x_ settings come and go between releases; one that this release lacks has nothing to switch.
    return wandb.Settings(**{key: value for key, value in wanted.items() if key in wandb.Settings.model_fields})
