"""What the ranks count in an update, put together."""

import ast
import subprocess
import sys

import pytest
import torch

from rl.learner import update_report
from rl.learner.update_report import UpdateTotals

GROWING = """
from rl.machine import peak_memory_bytes as peak
peaks = [peak()]
held = bytearray(96 << 20)
held[::4096] = b"x" * len(held[::4096])
peaks.append(peak())
del held
print(peaks + [peak()])
"""


def test_the_peak_grows_with_what_is_held_and_stays() -> None:
    done = subprocess.run([sys.executable, "-c", GROWING], capture_output=True, text=True, check=True)
    before, during, after = ast.literal_eval(done.stdout)
    if before is None:
        pytest.skip("this kernel does not tell VmHWM")
    assert during - before > 64 << 20
    assert after - before > 64 << 20  # the kernel counts in batches, so not exactly `during`


@pytest.mark.parametrize(("peaks", "expected"), [([3, 8, 5], 8), ([None, 4, 2], 4), ([None] * 3, None)])
def test_the_memory_of_an_update_is_that_of_the_largest_rank(
    monkeypatch: pytest.MonkeyPatch, peaks: list[int | None], expected: int | None
) -> None:
    ranks: list[UpdateTotals] = []
    for peak in peaks:
        monkeypatch.setattr(update_report, "peak_memory_bytes", lambda peak=peak: peak)
        ranks.append(UpdateTotals())
        ranks[-1].add_step(grad_norm=1.0, num_tokens=2, counts_LE=torch.ones(1, 2))
    for other in ranks[1:]:
        ranks[0].absorb(other)
    assert ranks[0].report({}).peak_bytes == expected
