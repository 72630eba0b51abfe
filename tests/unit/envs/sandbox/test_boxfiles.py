import os
import subprocess

import pytest

from envs.sandbox import boxfiles
from envs.sandbox.boxfiles import BoxPathError


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "box"
    path.mkdir()
    (tmp_path / "secret").write_bytes(b"secret")
    return str(path)


def _get(folder, path, max_bytes):
    buffer = memoryview(bytearray(max_bytes + 1))
    return bytes(buffer[: boxfiles.get_file(folder, path, buffer)])


def test_files_go_in_and_out(folder):
    boxfiles.put_file(folder, "a/b/c.txt", b"data")
    boxfiles.put_file(folder, f"{folder}/a/b/c.txt", b"new")
    assert _get(folder, "a/b/c.txt", 3) == b"new"
    with pytest.raises(BoxPathError, match="max_bytes"):
        _get(folder, "a/b/c.txt", 2)


@pytest.mark.parametrize("path", ["../secret", "a/../../secret", "", "a//b", ".", "a/.", ".."])
def test_a_path_that_is_not_plain_is_refused(folder, path):
    with pytest.raises(BoxPathError):
        _get(folder, path, 100)
    with pytest.raises(BoxPathError):
        boxfiles.put_file(folder, path, b"x")


def test_links_are_not_followed(folder, tmp_path):
    os.symlink(tmp_path / "secret", f"{folder}/file")
    os.symlink(tmp_path, f"{folder}/folder")
    for path in ("file", "folder/secret"):
        with pytest.raises(OSError, match=r"Too many levels|Not a directory"):
            _get(folder, path, 100)
        with pytest.raises(OSError, match=r"Too many levels|Not a directory"):
            boxfiles.put_file(folder, path, b"x")
    assert (tmp_path / "secret").read_bytes() == b"secret"


def test_a_pipe_does_not_make_the_agent_wait(folder):
    os.mkfifo(f"{folder}/pipe")
    with pytest.raises(BoxPathError, match="plain file"):
        _get(folder, "pipe", 100)
    with pytest.raises(OSError, match="No such device"):
        boxfiles.put_file(folder, "pipe", b"x")


def test_wiping_leaves_nothing_but_the_folder(folder, tmp_path):
    boxfiles.put_file(folder, "a/b/c.txt", b"data")
    os.symlink(tmp_path, f"{folder}/a/link")
    os.chmod(f"{folder}/a/b", 0)
    os.chmod(folder, 0)
    assert boxfiles.wipe((folder,))
    assert os.listdir(folder) == []
    assert os.stat(folder).st_mtime == 0
    assert (tmp_path / "secret").read_bytes() == b"secret"


def test_wiping_says_when_something_is_left(folder):
    start = os.getcwd()
    os.chdir(folder)
    try:
        for _ in range(1500):
            os.mkdir("deep")
            os.chdir("deep")
    finally:
        os.chdir(start)
    try:
        assert not boxfiles.wipe((folder,))
    finally:
        # Too deep for Python's own clean-up of temporary folders.
        subprocess.run(["rm", "-rf", folder], check=True)
