"""The number formats: every code against ml_dtypes, every rounding boundary by exact fractions."""

import ml_dtypes
import numpy as np
import pytest

from muse_jax.reference import formats

BYTES = np.arange(256, dtype=np.uint8)
FP8 = {
    "e4m3fn": (formats.decode_e4m3fn, formats.encode_e4m3fn, formats.E4M3FN, ml_dtypes.float8_e4m3fn),
    "e4m3fnuz": (formats.decode_e4m3fnuz, formats.encode_e4m3fnuz, formats.E4M3FNUZ, ml_dtypes.float8_e4m3fnuz),
}


def test_e2m1_values():
    assert formats.E2M1.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    np.testing.assert_array_equal(formats.decode_e2m1(np.arange(16)), [*formats.E2M1, *-formats.E2M1])


@pytest.mark.parametrize("name", FP8)
def test_fp8_codes_are_those_of_ml_dtypes(name):
    decode, _, _, dtype = FP8[name]
    np.testing.assert_array_equal(decode(BYTES), BYTES.view(dtype).astype(np.float64))


def test_e8m0_codes_are_those_of_ml_dtypes():
    np.testing.assert_array_equal(formats.decode_e8m0(BYTES), BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float64))


@pytest.mark.parametrize("name", ["e2m1", *FP8])
@pytest.mark.parametrize("sign", [1, -1])
def test_every_rounding_boundary(name, sign):
    """The middle of two neighbours goes to the even code, and a hair to either side of it to the neighbour there."""
    encode, table = (formats.encode_e2m1, formats.E2M1) if name == "e2m1" else FP8[name][1:3]
    mask = 7 if name == "e2m1" else 0x7F
    for low in range(len(table) - 1):
        middle = (table[low] + table[low + 1]) / 2
        points = np.array([table[low], np.nextafter(middle, 0), middle, np.nextafter(middle, 9e9), table[low + 1]])
        even = low if low % 2 == 0 else low + 1
        assert (encode(sign * points) & mask).tolist() == [low, low, even, low + 1, low + 1], middle


@pytest.mark.parametrize("name", FP8)
def test_fp8_round_trip(name):
    decode, encode, _, _ = FP8[name]
    codes = encode(decode(BYTES))
    expected = BYTES.copy()
    if name == "e4m3fn":
        expected[0xFF] = 0x7F
    np.testing.assert_array_equal(codes, expected)


def test_beyond_the_largest_value_and_zero():
    huge = np.array([1e30, np.inf, -1e30, -np.inf, np.nan, 0.0, -0.0, -1e-30])
    assert formats.encode_e2m1(huge[[0, 1, 2, 3, 5, 6, 7]]).tolist() == [7, 7, 15, 15, 0, 0, 0]
    assert formats.encode_e4m3fn(huge).tolist() == [0x7E, 0x7E, 0xFE, 0xFE, 0x7F, 0, 0x80, 0x80]
    assert formats.encode_e4m3fnuz(huge).tolist() == [0x7F, 0x7F, 0xFF, 0xFF, 0x80, 0, 0, 0]
