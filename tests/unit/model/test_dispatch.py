import logging

import pytest

from model.kernels.dispatch import GROUPED_EXPERTS, KernelError, resolve_grouped_experts
from model.kernels.grouped_experts import eager, reference


@pytest.fixture(autouse=True)
def _nothing_resolved_yet():
    resolve_grouped_experts.cache_clear()


def test_versions_are_resolved_by_name():
    assert resolve_grouped_experts("reference") is reference.experts_forward
    assert resolve_grouped_experts("eager") is eager.experts_forward
    assert resolve_grouped_experts("auto") is eager.experts_forward
    assert set(GROUPED_EXPERTS) == {"reference", "eager"}


def test_the_choice_and_its_reason_are_logged_once(caplog):
    with caplog.at_level(logging.INFO):
        resolve_grouped_experts("auto")
        resolve_grouped_experts("auto")
        resolve_grouped_experts("reference")
    assert caplog.messages == [
        "grouped_experts: eager (auto: sorted matrix products run on every device)",
        "grouped_experts: reference (requested by name)",
    ]


def test_an_unknown_name_is_an_error_that_lists_the_known_ones():
    with pytest.raises(KernelError, match=r"got 'triton'; choose one of auto, reference, eager"):
        resolve_grouped_experts("triton")
