import pytest
import torch

from rollout.config import ChatFormat
from rollout.renderers.registry import make_renderer
from rollout.tokenizer import train_tokenizer

CORPUS = [
    "def f(xs):\n    return sum([x * 2 for x in xs if x > 0])\n",
    "Write f(xs): the sum.",
    "f([1]) gave 2, want 3",
]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer(CORPUS * 4, vocab_size=300)


@pytest.fixture(scope="session")
def renderer(tokenizer):
    return make_renderer(ChatFormat.native, tokenizer)
