import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from model.safetensors_file import write_safetensors

METADATA = {"z": 'quoted "text"', "a": "größe", "m": "1", "b": "line\nline", "form": "master"}


def entries() -> dict[str, torch.Tensor]:
    return {
        "second": torch.arange(6.0).reshape(2, 3),
        "first": torch.zeros(0, 4),
        "ünit": torch.tensor([7], dtype=torch.uint8),
    }


def test_what_is_written_is_read_again(tmp_path: Path):
    write_safetensors(tmp_path / "file", entries(), METADATA)
    found = load_file(tmp_path / "file")
    assert found.keys() == entries().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in entries().items())
    with safe_open(tmp_path / "file", framework="pt") as stored:
        assert stored.metadata() == METADATA


def test_processes_write_the_same_bytes(tmp_path: Path):
    """The library's own order of five entries is one of 120, drawn anew by each process."""
    write = "import sys; from test_safetensors_file import *; write_safetensors(Path(sys.argv[1]), entries(), METADATA)"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    for number in range(3):
        subprocess.run(
            [sys.executable, "-c", write, str(tmp_path / str(number))],
            check=True,
            env={**os.environ, "PYTHONPATH": path},
        )
    assert len({(tmp_path / str(number)).read_bytes() for number in range(3)}) == 1
