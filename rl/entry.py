"""The way into every Hydra program of this project: `hydra_main` checks everything, then runs one job or a sweep.

    argv -> help | reject_unknown -> compose -> check -> preflight -> Hydra (run or multirun) -> run_one

Nothing heavy is imported here; `run_one` imports what it needs. Exit codes: 0 done, 1 a run failed, 2 a mistake in the
configuration (one line on stderr), 130 interrupted.
"""

from __future__ import annotations

import inspect
import signal
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn, get_type_hints

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from model import config as model_config
from rl import config_check, overrides, sweep
from rl.config import RunConfig
from rl.config_check import ConfigError
from rl.start_model import adopt_checkpoint, check_chat
from rollout.renderers.codec import RendererError
from rollout.tokenizer import TokenizerError

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_CONFIG: Final = 2
EXIT_INTERRUPTED: Final = 130

_PACKAGES: Final = ("rl", "rollout", "rewards", "envs", "model")


def hydra_main(run_one: Callable[[RunConfig], Any], *, module: str) -> int:
    """Run `run_one` on the configuration that the command line asks for, and return the exit code.

    Args:
        run_one: Carries out one run. Called once, or once for each job of a sweep; what it raises fails that run.
        module: The program's name for help and remedies, such as `rl.train`.
    """
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _main(run_one, module, sys.argv[1:])
    except ConfigError as error:
        say(" ".join(str(error).split()))
        return EXIT_CONFIG
    except KeyboardInterrupt:
        return _interrupted()
    except SystemExit as request:
        if request.code != signal.SIGTERM:  # while Ray starts, its own handler answers a SIGTERM in this way
            raise
        return _interrupted()
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupted() -> int:
    say("interrupted: the same command goes on from what was saved")
    return EXIT_INTERRUPTED


def say(line: str) -> None:
    """One plain line on stderr."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _main(run_one: Callable[[RunConfig], Any], module: str, argv: Sequence[str]) -> int:
    arguments = _parse(argv)
    folders = [overrides.CONF_FOLDER]
    if arguments.config_dir is not None:
        folders.append(Path(arguments.config_dir))
        if not folders[-1].is_dir():
            raise ConfigError(f"--config-dir: no such folder, got {arguments.config_dir}; name a folder of YAML groups")
    if arguments.help:
        sys.stdout.write(help_text(module, folders))
        return EXIT_OK
    if arguments.shell_completion or arguments.hydra_help:
        _through_hydra(lambda composed: None, argv)
        return EXIT_OK
    given = overrides.reject_unknown(arguments.overrides, multirun=arguments.multirun, folders=folders)
    flags = [argument for argument in argv if argument not in arguments.overrides]
    rewritten = [*flags, *given]
    if arguments.cfg or arguments.info:
        overrides.compose_run(given, folders=folders)
        _through_hydra(lambda composed: None, rewritten)
        return EXIT_OK
    _require_experiment(given, folders, module)
    jobs = overrides.expand(given)
    notes: dict[str, None] = {}
    for job in jobs:
        config = checked(overrides.compose_run(job, folders=folders), job, folders)
        notes |= dict.fromkeys(config_check.preflight(config))
    for note in notes:
        say(note)

    failures: list[Exception] = []
    outcomes: list[sweep.JobOutcome] = []

    def run_job(composed: DictConfig) -> None:
        config = checked(overrides.to_run_config(composed), given, folders)
        if HydraConfig.get().mode is RunMode.MULTIRUN:
            job = sweep.Job.of(config, HydraConfig.get().overrides.task, given)
            say(f"job {len(outcomes) + 1} of {len(jobs)}: {job.title}")
            outcomes.append(job.carry_out(lambda: attempt(run_one, config)))
            sweep.write_results(job.sweep_folder, outcomes)
            if outcomes[-1].error is not None:
                say(f"job {len(outcomes)} failed: {outcomes[-1].error}")
        elif (failure := attempt(run_one, config)) is not None:
            failures.append(failure)

    _through_hydra(run_job, rewritten)
    if outcomes:
        sys.stdout.write(sweep.table(outcomes))
        return EXIT_FAILED if any(outcome.error for outcome in outcomes) else EXIT_OK
    for failure in failures:
        if isinstance(failure, ConfigError):
            raise failure
        if not is_own(failure):
            traceback.print_exception(failure)
        say(f"run failed: {told(failure)}")
        return EXIT_FAILED
    return EXIT_OK


def checked(
    config: RunConfig, given: Sequence[str] = (), folders: Sequence[Path] = (overrides.CONF_FOLDER,)
) -> RunConfig:
    """The configuration, after all checks that do not look at this machine's resources; `given` composed it."""

    def default_of(key: str) -> str:
        return overrides.default_of(key, given, folders=folders, instead_of=config_check.flatten(config)[key])

    try:
        adopt_checkpoint(config)
    except model_config.ConfigError as error:
        raise ConfigError(str(error)) from error
    config_check.check(config, overrides.group_options(), default_of)
    from envs.base import EnvError  # the environments take a moment to import, and most mistakes are found by now
    from envs.extension import ExtensionError
    from envs.registry import FROM_PACKAGES, build_tasks, check_env_config

    try:
        check_chat(config)
        check_env_config(config.env)
        if config.env.dataset is not None or config.env.datasets or config.env.name in FROM_PACKAGES:
            tasks = build_tasks(config.env, seed=config.run.seed)  # reads and checks every row
            if tasks.evaluation_only:
                raise EnvError(f"env.name: for evaluation only, got {config.env.name!r}; train with env=codeio")
    except (EnvError, ExtensionError, RendererError, TokenizerError, model_config.ConfigError) as error:
        raise ConfigError(str(error)) from error
    return config


def attempt(run_one: Callable[[RunConfig], Any], config: RunConfig) -> Exception | None:
    """Carry out one run; a failure is returned, so that a sweep can go on."""
    try:
        run_one(config)
    except Exception as error:  # noqa: BLE001 (the outermost boundary: it decides the exit code)
        return error
    return None


def is_own(error: BaseException) -> bool:
    """Whether this project raised it: its message says everything, and the traceback is in failure.txt."""
    return type(_cause(error)).__module__.partition(".")[0] in _PACKAGES


def told(error: BaseException) -> str:
    """The error in one line: its message alone when it is this project's, with its type otherwise."""
    cause = _cause(error)
    line = " ".join(str(cause).split())
    return line if is_own(error) else f"{type(cause).__name__}: {line}"


def _cause(error: BaseException) -> BaseException:
    """What an actor raised, where Ray wraps it (its error holds the original as `cause`)."""
    inner = getattr(error, "cause", None)
    return inner if isinstance(inner, BaseException) else error


def _through_hydra(task: Callable[[DictConfig], None], argv: Sequence[str]) -> None:
    """Hand checked arguments to Hydra, which reads `sys.argv`."""
    program = sys.argv
    sys.argv = [program[0], *argv]
    try:
        hydra.main(config_path=str(overrides.CONF_FOLDER), config_name=overrides.CONFIG_NAME, version_base="1.3")(
            task
        )()
    except (FileExistsError, NotADirectoryError) as error:  # Hydra makes the run's folder before the run does
        raise ConfigError(
            f"run.root: cannot hold the run's folder, got {error.filename} ({error.strerror}); name another run.root "
            "or run.name"
        ) from error
    finally:
        sys.argv = program


def _parse(argv: Sequence[str]) -> Namespace:
    """Hydra's own flags; those that would go around the checks are refused."""
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"command line: {message}, got '{' '.join(argv)}'; values are written key=value, see --help")

    parser.error = refuse
    parser.allow_abbrev = False  # `--experiment=coding` would mean --experimental-rerun
    arguments = parser.parse_intermixed_args(argv)
    for flag in ("config_path", "config_name", "experimental_rerun"):
        if (value := getattr(arguments, flag)) is not None:
            name = f"--{flag.replace('_', '-')}"
            raise ConfigError(f"{name}: not used here, got {value}; put your own groups below --config-dir")
    modes = [name for name in ("run", "cfg", "multirun", "shell_completion", "info") if getattr(arguments, name)]
    if len(modes) > 1:
        raise ConfigError(f"command line: one mode at a time, got --{' --'.join(modes)}; keep one of them")
    if arguments.resolve and not arguments.cfg:
        raise ConfigError("--resolve: only read with --cfg, got no --cfg; add --cfg job")
    return arguments


def _require_experiment(given: Sequence[str], folders: Sequence[Path], module: str) -> None:
    """An experiment says what to learn; a user's own environment does as well."""
    for text in given:
        group, _, option = text.lstrip("+").partition("=")
        if group == overrides.EXPERIMENT or (group == "env" and option != "coding"):
            return
    experiments = overrides.group_options(folders)[overrides.EXPERIMENT]
    raise ConfigError(
        f"experiment: none chosen, got {' '.join(given) or 'no arguments'}; write python -m {module} "
        f"+experiment={'|'.join(experiments)}, or bring your own: env=custom env.target=my_package.my_env:MyEnv"
    )


def _class_of(section: str) -> type[Any]:
    """The dataclass of a section such as `model.rope`."""
    found: type[Any] = RunConfig
    for name in section.split("."):
        found = get_type_hints(found)[name]
    return found


def help_text(module: str, folders: Sequence[Path] = (overrides.CONF_FOLDER,)) -> str:
    """What there is to choose and to set, read from the groups and the dataclasses."""
    groups = overrides.group_options(folders)
    experiments = groups.pop(overrides.EXPERIMENT)
    start = f"  python -m {module}"
    lines = [
        f"python -m {module} +experiment=<name> [group=option ...] [key=value ...]",
        "",
        "Examples",
        f"{start} +experiment={experiments[0]}",
        f"{start} +experiment={experiments[0]} run.name=second run.seed=1",
        f"{start} -m +experiment={experiments[0]} algorithm.lr=1e-4,3e-4    a sweep, one job after the other",
        f"{start} +experiment={experiments[0]} reward=custom reward.target=my_package.my_reward:brevity",
        "",
        f"Experiments: {', '.join(experiments)}",
        "",
        "Groups",
        *(f"  {group + '=':<12}{', '.join(options)}" for group, options in groups.items()),
        "",
        "Keys and their defaults (another option of a group may set others; --cfg job shows what a run would use)",
    ]
    defaults = config_check.flatten(overrides.compose_run([], folders=folders))
    for section, keys in overrides.sections().items():
        summary = (inspect.getdoc(_class_of(section)) or "").partition("\n")[0]
        lines += ["", f"  {section}: {summary}"]
        lines += [f"    {key} = {overrides.shown(defaults[key])}" for key in keys]
    lines += [
        "",
        "Flags",
        "  -m, --multirun       run one job for each combination of the values key=a,b",
        "  -c, --cfg job        print the composed configuration and stop",
        "  -cd, --config-dir    a folder with options of your own: <folder>/experiment/mine.yaml",
        "  --hydra-help         flags of Hydra itself",
        "",
    ]
    return "\n".join(lines)
