"""Formats by bits against the numpy truth: all codes, all rounding boundaries, inside XLA and inside a kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractDevice, AbstractMesh

from muse_jax.reference import formats as truth
from pallas_kernels import formats
from pallas_kernels._pallas import pallas_call

BYTES = np.arange(256, dtype=np.uint8)
ENCODERS = {
    "e2m1": (formats.encode_e2m1, truth.encode_e2m1, truth.E2M1),
    "e4m3fn": (formats.encode_e4m3, truth.encode_e4m3fn, truth.E4M3FN),
    "e4m3fnuz": (lambda x: formats.encode_e4m3(x, "e4m3fnuz"), truth.encode_e4m3fnuz, truth.E4M3FNUZ),
}
DECODERS = {
    "e2m1": (formats.decode_e2m1, truth.decode_e2m1, BYTES[:16]),
    "e4m3fn": (formats.decode_e4m3, truth.decode_e4m3fn, BYTES),
    "e4m3fnuz": (lambda codes: formats.decode_e4m3(codes, "e4m3fnuz"), truth.decode_e4m3fnuz, BYTES),
    "e8m0": (formats.decode_e8m0, truth.decode_e8m0, BYTES),
}


def boundaries(table):
    """Every value of the format, every middle of two, the float32 on either side of each, and what lies beyond."""
    middles = (table[:-1] + table[1:]) / 2
    points = np.concatenate([table, middles, 2 * table[-1:] - middles[-1:]]).astype(np.float32)
    near = [points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(np.inf))]
    extremes = [np.float32([1e-45, 1e-38, 2**-126, 1e30, np.finfo(np.float32).max, np.inf])]
    magnitudes = np.concatenate(near + extremes)
    return np.concatenate([magnitudes, -magnitudes])


def in_a_kernel(function, interpret=True):
    """`function` of a 1-D array as the body of a Pallas kernel."""

    def call(x):
        def kernel(x_ref, out_ref):
            out_ref[...] = function(x_ref[...])

        padded = jnp.pad(x, (0, -len(x) % 256))
        options = dict(grid=(1,), num_warps=4, num_stages=1, interpret=interpret, name="formats")
        return pallas_call(kernel, out_shape=jax.eval_shape(function, padded), **options)(padded)[: len(x)]

    return call


@pytest.fixture(params=["xla", "kernel"])
def run(request):
    return jax.jit if request.param == "xla" else in_a_kernel


@pytest.mark.parametrize("name", DECODERS)
def test_every_code_decodes(name, run):
    decode, expected, codes = DECODERS[name]
    got, wanted = np.asarray(run(decode)(jnp.asarray(codes))), expected(codes)
    np.testing.assert_array_equal(
        got.view(np.int32)[~np.isnan(wanted)], np.float32(wanted).view(np.int32)[~np.isnan(wanted)]
    )
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))


@pytest.mark.parametrize("chip", ["gfx942", "gfx950"])
@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS, "fnuz", "divide", *formats.MX_RULES])
def test_lowers_to_triton(name, chip):
    """Each function is made of what Pallas can lower for an AMD GPU."""
    if name in formats.MX_RULES:
        function, dtype = lambda bits: formats.mx_scale(bits, formats.mx_exponent(bits, name)), jnp.int32
    elif name == "divide":
        function, dtype = lambda x: formats.divide(x, jnp.full_like(x, 3.0)), jnp.float32
    elif name == "fnuz":
        function, dtype = formats.fn_to_fnuz, jnp.uint8
    else:
        function, dtype = (ENCODERS[name][0], jnp.float32) if name in ENCODERS else (DECODERS[name][0], jnp.uint8)
    device = AbstractDevice(device_kind=chip, num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        traced = jax.jit(in_a_kernel(function, interpret=False)).trace(jax.ShapeDtypeStruct((256,), dtype))
        assert "triton" in traced.lower(lowering_platforms=("rocm",)).as_text()


@pytest.mark.parametrize("name", ENCODERS)
def test_every_rounding_boundary(name, run):
    encode, expected, table = ENCODERS[name]
    x = boundaries(table)
    np.testing.assert_array_equal(run(encode)(jnp.asarray(x)), expected(x.astype(np.float64)))


@pytest.mark.parametrize("name", ["e4m3fn", "e4m3fnuz"])
def test_nan_and_zeros_encode(name, run):
    encode, expected, _ = ENCODERS[name]
    x = np.array([np.nan, -np.nan, 0.0, -0.0], np.float32)
    np.testing.assert_array_equal(run(encode)(jnp.asarray(x)), expected(x))


@pytest.mark.parametrize("exponent", [-127, -126, -60, 0, 60, 125, 127])
def test_e2m1_of_scaled_values(exponent):
    """Every boundary at exponents where the values or their scale are subnormal or huge."""
    with np.errstate(over="ignore"):
        x = np.ldexp(boundaries(truth.E2M1).astype(np.float64), exponent).astype(np.float32)
    x = x[np.abs(x.astype(np.float64)) < np.ldexp(64.0, exponent)]
    expected = truth.encode_e2m1(np.ldexp(x.astype(np.float64), -exponent))
    np.testing.assert_array_equal(jax.jit(formats.encode_e2m1)(x, exponent), expected)


@pytest.mark.parametrize("name", ["e4m3fn", "e4m3fnuz"])
def test_random_values_encode_as_the_truth_does(name):
    encode, expected, _ = ENCODERS[name]
    random = np.random.default_rng(0)
    x = (random.standard_normal(50_000) * np.exp2(random.integers(-14, 10, 50_000))).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(encode)(x), expected(x.astype(np.float64)))


def test_fn_to_fnuz_halves_every_value(run):
    fnuz = np.asarray(run(formats.fn_to_fnuz)(jnp.asarray(BYTES))).astype(np.uint8)
    np.testing.assert_array_equal(2 * truth.decode_e4m3fnuz(fnuz), truth.decode_e4m3fn(BYTES) + 0.0)


def test_codes_are_the_bytes_of_jax_dtypes():
    """What is bitcast to float8 and multiplied natively is the number meant here."""
    for flavour, dtype in formats.E4M3_DTYPE.items():
        native = lax.bitcast_convert_type(jnp.asarray(BYTES), dtype).astype(jnp.float32)
        np.testing.assert_array_equal(native, formats.decode_e4m3(jnp.asarray(BYTES), flavour))


def test_e2m1_shifted_is_e4m3():
    """The magnitude bits moved up by two and the sign to bit 7: the value times 2^-6, or 2^-7 in the fnuz flavour."""
    codes = jnp.arange(16)
    moved = (codes & 7) << 2 | (codes & 8) << 4
    values = formats.decode_e2m1(codes)
    np.testing.assert_array_equal(formats.decode_e4m3(moved), values * 2.0**-6)
    np.testing.assert_array_equal(formats.decode_e4m3(moved.at[8].set(0), "e4m3fnuz"), values * 2.0**-7)


def test_division_is_exact_where_the_backend_is_not():
    """A broadcast divisor is multiplied by its reciprocal: some quotients are off; `divide` has none."""
    random = np.random.default_rng(0)
    x = random.standard_normal((2000, 64)).astype(np.float32) * np.exp2(random.integers(-40, 40, (2000, 1)))
    x, y = x.astype(np.float32), random.uniform(1e-4, 1e4, (2000, 1)).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(formats.divide)(x, y), x / y)
    zero = np.asarray(jax.jit(formats.divide)(np.float32([-0.0, 0.0]), np.float32([3.0])))
    assert np.signbit(zero).tolist() == [True, False]


def test_an_unknown_rule_is_refused():
    with pytest.raises(ValueError, match="rule is 'up'; expected one of even, floor, rceil"):
        formats.mx_exponent(jnp.zeros(1, jnp.int32), "up")


def test_half_up_would_be_seen():
    """A rounding that sends ties up instead of to the even code fails at one boundary in two."""
    table = truth.E2M1
    middles = ((table[:-1] + table[1:]) / 2).astype(np.float32)
    half_up = np.searchsorted(middles, middles, side="right")
    assert np.sum(np.asarray(formats.encode_e2m1(jnp.asarray(middles))) != half_up) == 4
