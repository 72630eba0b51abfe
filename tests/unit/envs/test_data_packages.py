import gzip
import sys

import pytest

from envs.base import EnvError
from envs.data_packages import data_file, digest, read_lines


def _package(folder, monkeypatch):
    """An installed distribution with one data file, on a path of its own."""
    (folder / "some_data-1.0.dist-info").mkdir()
    (folder / "some_data-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: some-data\nVersion: 1.0\n"
    )
    (folder / "some_data-1.0.dist-info" / "RECORD").write_text("some_data/rows.jsonl.gz,,\nsome_data/__init__.py,,\n")
    (folder / "some_data").mkdir()
    (folder / "some_data" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (folder / "some_data" / "rows.jsonl.gz").write_bytes(gzip.compress("1\n\nä\n".encode(), mtime=0))
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])


def test_a_data_file_is_found_without_importing_its_package(tmp_path, monkeypatch):
    _package(tmp_path, monkeypatch)
    path = data_file("some-data", "some_data/rows.jsonl.gz")
    assert path == tmp_path / "some_data" / "rows.jsonl.gz"
    assert read_lines(data_file("some-data", "rows.jsonl.gz")) == ["1\n", "ä\n"]
    assert len(digest(path)) == 64
    assert "some_data" not in sys.modules


def test_what_is_missing_is_said_in_one_line_with_the_remedy(tmp_path, monkeypatch):
    with pytest.raises(EnvError) as caught:
        data_file("no-such-data", "rows.jsonl.gz")
    assert str(caught.value) == "data package: not installed, got 'no-such-data'; run `make data-packages`"
    _package(tmp_path, monkeypatch)
    with pytest.raises(EnvError) as caught:
        data_file("some-data", "ows.jsonl.gz")
    assert str(caught.value) == "data package: no file 'ows.jsonl.gz' in it, got 'some-data'; run `make data-packages`"


def test_a_damaged_file_is_said_in_one_line(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b"row\n" * 1000)[:30])
    with pytest.raises(EnvError, match=r"data package: an unreadable file, got .*; run `make data-packages` again"):
        read_lines(path)
