"""Make the image of docker boxes from this machine's own Python, without a registry: `make sandbox-image`.

    python scripts/make_sandbox_image.py [--image NAME] [--python PATH]

The image holds the system's interpreter with its standard library, the C and C++ libraries and a few shell tools, and
no installed package. Its tag is a digest of what goes in, so an image is made once; `NAME:latest` points to the newest.
The engine is that of DOCKER_HOST. Debian or Ubuntu (files are found by `dpkg -L`).
"""

import argparse
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import docker
from docker.errors import DockerException, ImageNotFound

from envs.config import EnvConfig

LIBRARY_PACKAGES = ("libc6", "libstdc++6", "libgcc-s1")
TOOL_PACKAGES = ("coreutils", "dash", "bash", "grep", "sed", "findutils", "tar")
LEFT_OUT_FOLDERS = {
    "test",
    "idlelib",
    "tkinter",
    "turtledemo",
    "lib2to3",
    "ensurepip",
    "site-packages",
    "dist-packages",
}
LEFT_OUT_ENDINGS = (".a", ".opt-1.pyc", ".opt-2.pyc")
NOBODY = 65534
TEXTS = {
    "etc/passwd": f"root:x:0:0::/:/bin/false\nnobody:x:{NOBODY}:{NOBODY}::/work:/bin/sh\n",
    "etc/group": f"root:x:0:\nnogroup:x:{NOBODY}:\n",
}
EMPTY_FOLDERS = ("proc", "sys", "dev", "run", "tmp", "work")


class ImageError(RuntimeError):
    """The image cannot be made here."""


def files_of_packages(names: Iterable[str]) -> list[str]:
    """Programs and libraries of Debian packages, without documentation and character sets."""
    done = subprocess.run(["dpkg", "-L", *names], capture_output=True, text=True, check=False)
    folders = ("/lib/", "/lib64/", "/bin/")
    return [
        path
        for path in done.stdout.splitlines()
        if os.path.isfile(path)
        and any(folder in path for folder in folders)
        and "/share/" not in path
        and "/gconv/" not in path
    ]


def libraries_of(paths: Iterable[str]) -> set[str]:
    """The shared libraries that the dynamic linker would load for these files."""
    done = subprocess.run(["ldd", *paths], capture_output=True, text=True, check=False)
    words = (word for line in done.stdout.splitlines() if line.startswith("\t") for word in line.split())
    return {word for word in words if word.startswith("/")}


def collect(python: str) -> tuple[str, list[str]]:
    """The interpreter's real path, and every file of the image."""
    code = "import os, sys, sysconfig; print(os.path.realpath(sys.executable), sysconfig.get_path('stdlib'))"
    is_old = "import sys; sys.exit(sys.version_info < (3, 11))"
    try:
        found = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True).stdout.split()
        new_enough = subprocess.run([python, "-I", "-c", is_old], check=False)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ImageError(f"--python: cannot be started, got {error}; name the system's python3") from None
    if new_enough.returncode:
        raise ImageError(f"--python: 3.11 or newer is due, got an older {python}; name a newer one")
    interpreter, standard_library = found
    files = {interpreter, *files_of_packages(LIBRARY_PACKAGES), *files_of_packages(TOOL_PACKAGES)}
    for root, folders, names in os.walk(standard_library):
        folders[:] = [name for name in folders if name not in LEFT_OUT_FOLDERS and not name.startswith("config-")]
        files.update(os.path.join(root, name) for name in names if not name.endswith(LEFT_OUT_ENDINGS))
    linked = [path for path in files if ".so" in path or "/bin/" in path]
    files |= libraries_of(linked)
    if os.path.exists("/etc/ld.so.cache"):
        files.add("/etc/ld.so.cache")
    return interpreter, sorted(os.path.normpath(path) for path in files if os.path.isfile(path))


def digest(files: list[str]) -> str:
    """Twelve hexadecimal digits that change when a file of the image or this script does."""
    state = hashlib.sha256(Path(__file__).read_bytes())
    for path in files:
        facts = os.stat(path)
        state.update(f"{path} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    return state.hexdigest()[:12]


def write_root(out: IO[bytes], interpreter: str, files: list[str]) -> None:
    """The root file system as a tar archive. Links are replaced by what they point to, so none can dangle."""
    with tarfile.open(fileobj=out, mode="w|") as archive:
        made: set[str] = set()

        def add_folder(name: str) -> None:
            if name and name not in made:
                add_folder(os.path.dirname(name))
                entry = tarfile.TarInfo(name)
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                archive.addfile(entry)
                made.add(name)

        def add(name: str, data: bytes, mode: int) -> None:
            add_folder(os.path.dirname(name))
            entry = tarfile.TarInfo(name)
            # No set-user-id bits: nothing in a box may raise its rights.
            entry.size, entry.mode = len(data), mode & 0o755
            archive.addfile(entry, io.BytesIO(data))

        for path in files:
            # A byte-code file is used only beside a source of the same time.
            entry = tarfile.TarInfo(path.lstrip("/"))
            facts = os.stat(path)
            add_folder(os.path.dirname(entry.name))
            entry.size, entry.mode, entry.mtime = facts.st_size, facts.st_mode & 0o755, facts.st_mtime
            with open(path, "rb") as file:
                archive.addfile(entry, file)
        for name, text in TEXTS.items():
            add(name, text.encode(), 0o644)
        for name in EMPTY_FOLDERS:
            add_folder(name)
        add_folder("usr/local/bin")
        for name in ("python3", "python"):
            link = tarfile.TarInfo(f"usr/local/bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, interpreter
            archive.addfile(link)


def make(client: docker.DockerClient, image: str, python: str) -> str:
    """The full name of the image, which is made unless the engine has it. Raises `ImageError`."""
    interpreter, files = collect(python)
    tag = digest(files)
    name = f"{image}:{tag}"
    try:
        client.images.get(name)
    except ImageNotFound:
        with tempfile.NamedTemporaryFile(prefix="sandbox-image-", suffix=".tar") as file:
            write_root(file, interpreter, files)
            file.flush()
            client.api.import_image_from_file(
                file.name, repository=image, tag=tag, changes=["ENV PATH=/usr/local/bin:/usr/bin:/bin"]
            )
    client.images.get(name).tag(image, "latest")
    return name


def main() -> int:
    """Make the image and name it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", default=EnvConfig().sandbox_image)
    parser.add_argument("--python", default="/usr/bin/python3")
    options = parser.parse_args()
    start = time.monotonic()
    try:
        name = make(docker.from_env(), options.image, options.python)
    except (ImageError, DockerException) as error:
        print(f"sandbox image: not made, got {error}; is DOCKER_HOST an engine that runs?", file=sys.stderr)
        return 1
    print(f"sandbox image: {name}, {time.monotonic() - start:.1f} s; use it with env.sandbox=docker")
    return 0


if __name__ == "__main__":
    sys.exit(main())
