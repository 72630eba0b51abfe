"""The Ray cluster of a run: started on this machine and torn down after, or an existing one that is joined."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from rl.config import ClusterConfig
from rl.reaper import Reaper
from rl.run_folder import remove_dead_folders, short_temp_folder


class ClusterError(RuntimeError):
    """Ray did not start, or the cluster is too small for the run."""


@contextmanager
def ray_cluster(config: ClusterConfig, *, num_cpus: int) -> Iterator[None]:
    """A cluster with at least `num_cpus` Ray CPUs.

    On this machine that number is declared, not measured: the learner computes while the rollout workers wait, so both
    count as having the machine to themselves, and their real threads are set by `rl.config_check.resolve_workers`.
    """
    # A thread of torch's pool that spins at a barrier takes the CPU from the one it waits for. The workers inherit it.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    remove_dead_folders()
    folder = short_temp_folder()
    reaper = Reaper(folder)
    try:
        if config.address is None:
            ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                object_store_memory=config.object_store_mb * 2**20,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=str(folder),
            )
        else:
            ray.init(address=config.address, log_to_driver=False, logging_level=logging.ERROR)
            _require_cpus(num_cpus)
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
        reaper.dismiss()


def _require_cpus(num_cpus: int) -> None:
    available = ray.cluster_resources().get("CPU", 0)
    if available < num_cpus:
        raise ClusterError(
            f"cluster.address: the run needs {num_cpus} CPUs, got {available:.0f} in the cluster; lower "
            "rollout.num_workers or add nodes"
        )
