"""The ablations of LOG.md: one change at a time, every arm with the same seeds from one warm start.

    python scripts/ablate.py                          run what is missing, then print the table
    python scripts/ablate.py --write LOG.md           and put it between the two marks of that file
    python scripts/ablate.py --only grpo --rounds 1   a part of it, to try it out

Every run is a run folder below `--root`, so the same command goes on where it was stopped or killed. What a finished
run found goes into `--results`, with the start it began from, and is never run again, also without its folder; runs of
one seed that began from another start (another machine makes other bits) are not compared, but run again. The seed of a
run draws its tasks and samples; the start is the same for all.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rl.metrics import METRICS_FILE, read_metrics
from rl.run_folder import read_result, write_atomically

ARMS: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "ppo": ("algorithm=ppo",),
    "dapo": ("algorithm=dapo",),
    "dr_grpo": ("algorithm=dr_grpo",),
    "rloo": ("algorithm=rloo",),
    "reinforce_pp": ("algorithm=reinforce_pp",),
    "gspo": ("algorithm=gspo",),
    "cispo": ("algorithm=cispo",),
    "grpo, routes not replayed": ("learner.router_replay=false",),
    "grpo, 2 versions stale": ("rollout.hold_back_versions=2",),
    "grpo, 2 versions stale, corrected": ("rollout.hold_back_versions=2", "algorithm.importance=truncate"),
    "grpo, 8 versions stale": ("rollout.hold_back_versions=8",),
    "grpo, 8 versions stale, corrected": ("rollout.hold_back_versions=8", "algorithm.importance=truncate"),
    "grpo, no quantization in the forward": ("learner.quantization.enabled=false", "algorithm.importance=truncate"),
}
"""What an arm changes in `+experiment=coding`; "grpo" is the one whose samples are not stale.

Without quantization in the forward the learner's logprobs are not the sampler's, and the parity gate bounds none:
token weights proximal / behavior, truncated at the default cap, correct for the difference.
"""

BEGIN, END = "<!-- ablation: begin (scripts/ablate.py) -->", "<!-- ablation: end -->"
LAST_ROUNDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A finished run: held-out pass rates (greedy, fractions) and means over its last rounds; `start` is a digest."""

    start: str
    rounds: int
    held_out_before: float
    held_out_after: float
    reward: float
    clip_frac: float
    grad_norm: float
    minutes: float

    @classmethod
    def of(cls, folder: Path, start: str) -> Outcome | None:
        """Of a run's folder; `None` while it is not finished."""
        result = read_result(folder)
        if result is None:
            return None
        trained = [row for row in read_metrics(folder / METRICS_FILE) if row.round > 0]
        rows = trained[-LAST_ROUNDS:]

        def mean(name: str) -> float:
            found = [value for row in rows if (value := row.values.get(name)) is not None]
            return statistics.fmean(found) if found else float("nan")

        return cls(
            start=start,
            rounds=len(trained),
            held_out_before=result.held_out_before,
            held_out_after=result.held_out_after,
            reward=mean("reward/total"),
            clip_frac=mean("clip_frac"),
            grad_norm=mean("grad_norm"),
            minutes=result.minutes,
        )


def run_name(arm: str, seed: int) -> str:
    """The name of a run's folder."""
    return f"{arm.replace(', ', '-').replace(' ', '_')}-{seed}"


class Outcomes:
    """The finished runs by name, in a file that outlives their folders."""

    def __init__(self, file: Path) -> None:
        self._file = file
        written = json.loads(file.read_text()) if file.is_file() else {}
        self._found = {name: Outcome(**fields) for name, fields in written.items()}

    def get(self, arm: str, seed: int, rounds: int) -> Outcome | None:
        """Of a run of so many rounds; `None` when there is none from the start that the first arm began from."""
        found, first = (self._found.get(run_name(name, seed)) for name in (arm, next(iter(ARMS))))
        same = found is not None and first is not None and found.start == first.start
        return found if found is not None and same and found.rounds == rounds else None

    def put(self, arm: str, seed: int, outcome: Outcome) -> None:
        """Keep it, in the file too."""
        self._found[run_name(arm, seed)] = outcome
        fields = {name: asdict(outcome) for name, outcome in sorted(self._found.items())}
        write_atomically(self._file, json.dumps(fields, indent=1) + "\n")


def run_missing(arms: Sequence[str], arguments: argparse.Namespace, outcomes: Outcomes) -> bool:
    """Carry out every run that is not finished; whether all are now. One that fails does not end the others."""
    rounds, complete = arguments.rounds, True
    for seed in arguments.seeds:
        if all(outcomes.get(arm, seed, rounds) is not None for arm in arms):
            continue
        folder = warm_start(arguments.root)
        start = hashlib.blake2b((folder / "model.safetensors").read_bytes(), digest_size=8).hexdigest()
        for arm in arms:
            known = outcomes.get(arm, seed, rounds)
            if known is not None and known.start == start:
                continue
            found = run(arm, seed, folder, start, arguments)
            if found is None:
                complete = False
            else:
                outcomes.put(arm, seed, found)
    return complete


def run(arm: str, seed: int, folder: Path, start: str, arguments: argparse.Namespace) -> Outcome | None:
    """Carry out one run, or go on with it; `None` when it fails."""
    name = run_name(arm, seed)
    begun = time.monotonic()
    overrides = (
        *ARMS[arm], f"run.seed={seed}", f"run.rounds={arguments.rounds}", f"run.name={name}",
        f"run.root={arguments.root}", f"warm_start.checkpoint={folder}", "run.eval_every=1000",
        "logging.wandb=disabled",
    )  # fmt: skip
    found = Outcome.of(arguments.root / name, start)
    if found is None:
        subprocess.run([sys.executable, "-m", "rl.train", "+experiment=coding", *overrides], check=False)
        found = Outcome.of(arguments.root / name, start)
    minutes = (time.monotonic() - begun) / 60
    print(f"{name}: {'FAILED' if found is None else 'finished'} in {minutes:.1f} minutes", flush=True)
    return found


def warm_start(root: Path) -> Path:
    """The start of every run, made once (seed 0)."""
    note = root / "start.json"
    if not note.is_file():
        root.mkdir(parents=True, exist_ok=True)
        argv = [sys.executable, "-m", "rl.sft", "+experiment=coding", f"warm_start.cache={root / 'warm'}"]
        subprocess.run([*argv, f"run.root={root}", "run.name=start"], check=True)
        (folder,) = (path.parent for path in (root / "warm").glob("*/model.safetensors"))
        write_atomically(note, json.dumps(str(folder.resolve())))
    return Path(json.loads(note.read_text()))


def table(arms: Sequence[str], outcomes: Outcomes, seeds: Sequence[int], rounds: int) -> str:
    """Markdown: a line an arm, means over the seeds that are finished, and each seed's held-out rate."""
    lines = [
        f"Held-out pass rate (greedy) after {rounds} rounds of `+experiment=coding` from one warm start; means over",
        f"the seeds. Reward, clipped tokens and gradient norm are those of the last {LAST_ROUNDS} rounds.",
        "",
        f"| arm | before | after | seeds {', '.join(map(str, seeds))} | reward | clipped | norm | minutes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for arm in arms:
        found = [outcomes.get(arm, seed, rounds) for seed in seeds]
        done = [outcome for outcome in found if outcome is not None]
        if not done:
            lines.append(f"| {arm} | | not run | | | | | |")
            continue
        each = ", ".join("-" if outcome is None else f"{outcome.held_out_after:.1%}" for outcome in found)
        before, after, reward, clipped, norm, minutes = (
            statistics.fmean(getattr(outcome, name) for outcome in done)
            for name in ("held_out_before", "held_out_after", "reward", "clip_frac", "grad_norm", "minutes")
        )
        cells = (f"{before:.1%}", f"{after:.1%}", each, f"{reward:+.3f}", f"{clipped:.2%}", f"{norm:.2f}")
        lines.append(f"| {arm} | {' | '.join(cells)} | {minutes:.1f} |")
    return "\n".join(lines)


def write_between_marks(file: Path, text: str) -> None:
    """Replace what stands between the marks; they are put at the end of a file that has none."""
    content = file.read_text()
    if BEGIN not in content:
        content = f"{content.rstrip()}\n\n{BEGIN}\n{END}\n"
    head, _, rest = content.partition(BEGIN)
    _, _, tail = rest.partition(END)
    write_atomically(file, f"{head}{BEGIN}\n{text}\n{END}{tail}")


def main() -> int:
    """0 when every run is finished."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("runs/ablation"), help="folder of the runs")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help=f"of {list(ARMS)}")
    parser.add_argument("--table", action="store_true", help="run nothing, show what is finished")
    parser.add_argument("--results", type=Path, default=Path("results/ablation.json"), help="what runs found")
    parser.add_argument("--write", type=Path, help="file whose marked part becomes the table")
    arguments = parser.parse_args()
    outcomes = Outcomes(arguments.results)
    complete = arguments.table or run_missing(arguments.only, arguments, outcomes)
    text = table(arguments.only, outcomes, arguments.seeds, arguments.rounds)
    print(text)
    if arguments.write is not None:
        write_between_marks(arguments.write, text)
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
