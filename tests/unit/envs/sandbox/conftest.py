import pytest

from envs.config import SandboxKind
from envs.sandbox.base import SandboxSpec, SandboxUnavailable
from envs.sandbox.pool import SandboxPool

SMALL = SandboxSpec(memory_mb=256, num_processes=12, tmpfs_mb=8, num_inodes=512, file_mb=8, max_output_bytes=1000)


@pytest.fixture(scope="session")
def local_pool():
    try:
        pool = SandboxPool(SandboxKind.local, SMALL, 2, acquire_timeout_s=30.0)
    except SandboxUnavailable as error:
        pytest.skip(f"local sandbox: {error}")
    yield pool
    pool.close()


@pytest.fixture
def box(local_pool):
    with local_pool.acquire() as box:
        yield box
