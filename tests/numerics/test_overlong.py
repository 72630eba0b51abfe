"""arXiv 2503.14476 eq. 13."""

import numpy as np
import pytest

from rl.algorithms.base import AlgorithmError
from rl.algorithms.overlong import Overlong


def equation_13(length: int, limit: int, cache: float) -> float:
    if length <= limit - cache:
        return 0.0
    return ((limit - cache) - length) / cache if length <= limit else -1.0


@pytest.mark.parametrize(("limit", "buffer"), [(20, 4), (48, 9.6), (10, 10)])
def test_the_punishment_is_that_of_the_paper(limit: int, buffer: float):
    lengths = range(2 * limit)
    expected = [equation_13(length, limit, buffer) for length in lengths]
    np.testing.assert_allclose(
        [Overlong(limit=limit, buffer=buffer, coef=1.0).of(length) for length in lengths], expected, atol=1e-12
    )
    halved = [Overlong(limit=limit, buffer=buffer, coef=0.5).of(length) for length in lengths]
    np.testing.assert_allclose(halved, 0.5 * np.array(expected), atol=1e-12)
    assert {0.0, -1.0} < set(expected)


@pytest.mark.parametrize("buffer", [0, -1, 21, float("nan")])
def test_a_buffer_outside_the_limit_is_refused(buffer: float):
    with pytest.raises(AlgorithmError, match=r"^algorithm\.overlong_buffer_frac: the buffer must lie in the limit of"):
        Overlong(limit=20, buffer=buffer, coef=1.0)
