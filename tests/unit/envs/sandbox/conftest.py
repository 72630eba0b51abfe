import os

import pytest

from envs.config import SandboxKind
from envs.sandbox.base import SandboxSpec, SandboxUnavailable
from envs.sandbox.pool import SandboxPool

SMALL = SandboxSpec(memory_mb=256, num_processes=12, tmpfs_mb=8, num_inodes=512, file_mb=8, max_output_bytes=1000)


def _pool(kind):
    try:
        return SandboxPool(kind, SMALL, 2, acquire_timeout_s=30.0)
    except SandboxUnavailable as error:
        if kind is SandboxKind.docker and os.environ.get("REQUIRE_DOCKER"):
            raise
        pytest.skip(f"{kind.value} sandbox: {error}")


@pytest.fixture(scope="session")
def local_pool():
    pool = _pool(SandboxKind.local)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def docker_pool():
    pool = _pool(SandboxKind.docker)
    yield pool
    pool.close()


@pytest.fixture(params=["local", pytest.param("docker", marks=pytest.mark.docker)])
def box(request):
    with request.getfixturevalue(f"{request.param}_pool").acquire() as box:
        yield box
