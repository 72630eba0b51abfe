"""What the ablations keep of finished runs, and which of them they compare."""

import dataclasses
from pathlib import Path

from scripts.ablate import ARMS, Outcome, Outcomes, table, write_between_marks

FIRST, SECOND = list(ARMS)[:2]
FOUND = Outcome(
    start="a", rounds=15, held_out_before=0.5, held_out_after=0.9, reward=0.8, clip_frac=0.01, grad_norm=0.1, minutes=2
)


def test_outcomes_outlive_their_run_folders_and_only_those_of_one_start_are_compared(tmp_path: Path):
    file = tmp_path / "ablation.json"
    outcomes = Outcomes(file)
    assert outcomes.get(FIRST, 0, 15) is None
    outcomes.put(FIRST, 0, FOUND)
    outcomes.put(SECOND, 0, dataclasses.replace(FOUND, start="b"))
    outcomes.put(SECOND, 1, FOUND)
    again = Outcomes(file)
    assert again.get(FIRST, 0, 15) == FOUND
    assert again.get(FIRST, 0, 30) is None, "of other rounds"
    assert again.get(SECOND, 0, 15) is None, "of another start"
    assert again.get(SECOND, 1, 15) is None, "nothing to compare it with"
    again.put(SECOND, 0, FOUND)
    assert Outcomes(file).get(SECOND, 0, 15) == FOUND


def test_the_table_says_what_is_missing_and_stands_between_its_marks(tmp_path: Path):
    outcomes = Outcomes(tmp_path / "ablation.json")
    outcomes.put(FIRST, 0, FOUND)
    outcomes.put(FIRST, 2, dataclasses.replace(FOUND, held_out_after=0.8))
    text = table([FIRST, SECOND], outcomes, [0, 1, 2], 15)
    assert f"| {FIRST} | 50.0% | 85.0% | 90.0%, -, 80.0% | +0.800 | 1.00% | 0.10 | 2.0 |" in text.splitlines()
    assert f"| {SECOND} | | not run | | | | | |" in text.splitlines()
    log = tmp_path / "LOG.md"
    log.write_text("# Log\n")
    for _ in range(2):
        write_between_marks(log, text)
    assert log.read_text().count(text) == 1
    assert log.read_text().startswith("# Log\n\n<!-- ablation: begin")
