"""round_to against exact rational arithmetic."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from muse_jax.reference.rounding import BFLOAT16, FLOAT32, FLOAT64, round_to, widen

EVERY_BF16 = widen(np.arange(0x7F80, dtype=np.uint16).view(ml_dtypes.bfloat16))  # the finite ones, 0 and up, ascending


def nearest_bf16(value):
    """By comparing the two neighbours in exact arithmetic; past the midpoint after the largest one, infinity."""
    size = Fraction(abs(value))
    above = int(np.searchsorted(EVERY_BF16, abs(value)))
    if above == len(EVERY_BF16):
        last, step = Fraction(EVERY_BF16[-1]), Fraction(EVERY_BF16[-1] - EVERY_BF16[-2])
        return math.copysign(EVERY_BF16[-1] if size < last + step / 2 else math.inf, value)
    below = max(above - 1, 0)
    left, right = size - Fraction(EVERY_BF16[below]), Fraction(EVERY_BF16[above]) - size
    up = right < left or (right == left and above % 2 == 0)
    return math.copysign(EVERY_BF16[above if up else below], value)


@given(st.floats(allow_nan=False, allow_infinity=False))
@example(1 + 2**-8 + 2**-30)
@example(1 + 2**-8)
@example(-(1 + 3 * 2**-8))
@example(2.0**-134)
@example(2.0**-134 * (1 + 2**-52))
@example(3.39e38)
@example(3.3961775292304957e38)
@example(0.0)
@example(-0.0)
def test_bfloat16_is_the_nearest(value):
    rounded = widen(round_to(value, BFLOAT16))
    expected = nearest_bf16(value)
    assert rounded == expected
    assert np.signbit(rounded) == np.signbit(expected)


def test_bfloat16_values_stay():
    both = np.concatenate([EVERY_BF16, -EVERY_BF16])
    np.testing.assert_array_equal(widen(round_to(both, BFLOAT16)), both)


def test_bfloat16_is_not_rounded_twice():
    value = 1 + 2**-8 + 2**-30
    assert widen(round_to(value, BFLOAT16)) == 1 + 2**-7
    assert float(np.float32(value).astype(ml_dtypes.bfloat16)) == 1.0


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32, FLOAT64])
def test_non_finite_values_and_shape(dtype):
    values = np.array([[np.nan, np.inf, -np.inf]])
    rounded = round_to(values, dtype)
    assert rounded.dtype == dtype
    np.testing.assert_array_equal(widen(rounded), values)
    assert round_to(np.zeros((0, 3)), dtype).shape == (0, 3)


def test_overflow_is_infinite():
    np.testing.assert_array_equal(round_to([1e39, -1e300], FLOAT32), np.float32([np.inf, -np.inf]))
    np.testing.assert_array_equal(widen(round_to([1e39, -1e300], BFLOAT16)), [np.inf, -np.inf])


def test_unknown_dtype():
    with pytest.raises(ValueError, match="dtype is float16; expected bfloat16, float32 or float64"):
        round_to(1.0, np.float16)
