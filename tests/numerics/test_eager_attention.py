"""Paged attention in a few torch operations equals its definition."""

import pytest
import torch

from model.kernels.attention import reference
from model.kernels.attention.eager import EagerAttention
from tests.numerics.test_paged_attention import STORED, make_case
from tests.numerics.tolerances import ATTENTION, U16, relative_error

MIXED = ([0, 5, 17, 40, 3], [4, 1, 30, 1, 1])
"""Starts and counts: prompts, a chunk, and three that decode."""


@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize(
    "how", [{}, {"window": 7}, {"sinks": True}, {"window": 3, "sinks": True}, {"latent": True}], ids=str
)
@pytest.mark.parametrize(
    "sequences", [MIXED, ([9, 0, 30], [1, 1, 1]), ([6], [20]), ([4, 4], [0, 2])], ids=["mixed", "decode", "one", "none"]
)
def test_outputs_are_those_of_the_definition(stored, how, sequences):
    """Slots beyond a sequence hold NaN, and must not be noticed."""
    latent = how.get("latent", False)
    shape = {"value_dim": 12, "latent": True} if latent else {}
    case = make_case(*sequences, 4, 1 if latent else 2, 20, page_size=4, stored=stored, **shape)
    sinks_H = torch.linspace(-1, 1, 4) if how.get("sinks") else None
    given = {"scale": 0.3, "window": how.get("window", 0), "sinks_H": sinks_H}
    expected = reference.paged_attention(*case[:4], **given)
    actual = EagerAttention()(*case[:4], **given)
    assert actual.dtype == case.q_THd.dtype
    assert relative_error(actual.float(), expected.float()) <= (ATTENTION if actual.dtype == torch.float32 else 2 * U16)


def test_bf16_queries_give_bf16():
    case = make_case(*MIXED, 4, 2, 16, stored=torch.bfloat16, q_dtype=torch.bfloat16)
    expected = reference.paged_attention(*case[:4], scale=0.25)
    actual = EagerAttention()(*case[:4], scale=0.25)
    assert actual.dtype == torch.bfloat16
    assert relative_error(actual.float(), expected.float()) <= 2 * U16
