"""The script for a machine with a GPU: its cases run in the interpreter, and a wrong kernel gets no figures."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "gpu_check.py"


def run(*arguments):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return runpy.run_path(str(SCRIPT))


def test_small_cases_agree_with_their_definitions(script, monkeypatch, capsys):
    for word in ("decode_equals_prefill", "rms_norm", "route", "quantize"):
        monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--tiny", "--only", word])
        assert script["main"]() == 0, capsys.readouterr().out


def test_a_wrong_kernel_has_no_figures(script):
    """One that differs, one that is not finite and one that does not run."""
    right, wrong, broken = torch.ones(3), torch.tensor([1.0, 1.0, 1.1]), torch.tensor([1.0, 1.0, torch.nan])

    def row(run):
        work = script["Work"](run=run, expected=lambda: right, tolerance=0.01, num_bytes=1)
        return script["_row"](lambda *_: work, "cpu", script["Size"].TINY, None, 0.0)

    assert row(lambda: right)["error"] == 0.0
    assert row(lambda: wrong)["problem"] == "differs from its definition by 0.1, 0.01 are allowed"
    assert "differs" in row(lambda: broken)["problem"]
    assert row(lambda: 1 // 0)["problem"].startswith("ZeroDivisionError")


def test_peaks_are_found_by_a_part_of_the_name(script):
    assert script["_peak"]("NVIDIA H200") == (4.8e12, 989e12)
    assert script["_peak"]("NVIDIA A100-SXM4-40GB")[0] == 1.555e12
    assert script["_peak"]("NVIDIA A100-SXM4-80GB")[0] == 2.039e12
    assert script["_peak"]("another") is None


def test_names_need_no_gpu():
    listed = run("--list")
    assert listed.returncode == 0
    assert "decode_latent" in listed.stdout.split()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_one_line_says_so():
    refused = run()
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].startswith("gpu_check: needs a GPU that torch can use, got none")
