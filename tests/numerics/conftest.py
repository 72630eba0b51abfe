import os

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def own_environment():
    """For learners in this process: DeepSpeed meets its ranks through environment variables."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
