"""Settings of every test: quiet, offline, one thread."""

import ipaddress
import os
import socket
from collections.abc import Iterator

import pytest

os.environ |= {
    "OMP_NUM_THREADS": "1",  # before torch is loaded; two cores are shared with Ray's workers
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@pytest.fixture(scope="session", autouse=True)
def _no_network() -> Iterator[None]:
    """Refuse TCP to the world; this machine's own addresses stay (Ray, the OpenAI-compatible server)."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: object) -> None:
        if self.type & socket.SOCK_STREAM and isinstance(address, tuple):
            try:
                is_global = ipaddress.ip_address(str(address[0])).is_global
            except ValueError:
                is_global = address[0] not in ("localhost", socket.gethostname())
            if is_global:
                raise OSError(f"tests use no network, got a connection to {address[0]}; serve it on this machine")
        connect(self, address)  # pyright: ignore[reportArgumentType]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded)
        yield
