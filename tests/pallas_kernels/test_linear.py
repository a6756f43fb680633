"""The linear layer against float64, on both sides of the token count where the kernel ends."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import linear as package
from pallas_kernels.linear import FEW_TOKENS
from tests.one_program import one_program
from tests.pallas_kernels.cases import row_error

linear = one_program(package.linear)

# float32: sums of up to 200 products; bfloat16: one rounding, 2^-9 of the largest elements.
TOLERANCE = {"float32": 2e-6, "bfloat16": 4e-3}


def problem(tokens: int, outputs: int, inputs: int, dtype: str):
    rng = np.random.default_rng(tokens + outputs)
    x = jnp.asarray(rng.standard_normal((tokens, inputs)), dtype)
    return x, jnp.asarray(rng.standard_normal((outputs, inputs)), dtype)


@pytest.mark.parametrize("tokens", [0, 1, 7, FEW_TOKENS, FEW_TOKENS + 1])
@pytest.mark.parametrize("outputs,inputs", [(64, 128), (50, 200), (32, 24)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_product(tokens: int, outputs: int, inputs: int, dtype: str, implementation) -> None:
    x, weight = problem(tokens, outputs, inputs, dtype)
    out = linear(x, weight, implementation=implementation)
    assert out.dtype == x.dtype
    want = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    assert row_error(out, want) < TOLERANCE[dtype]
    assert row_error(want[:, ::-1], want) > 100 * TOLERANCE[dtype] or tokens == 0


def test_one_rounding() -> None:
    x, weight = problem(5, 64, 128, "bfloat16")
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    for implementation in ("xla", "pallas"):
        out = linear(x, weight, implementation=implementation)
        assert np.mean(np.asarray(out) == exact.astype(jnp.bfloat16)) > 0.995


def test_nan_stays_in_its_row() -> None:
    x, weight = problem(5, 50, 200, "float32")
    for implementation in ("xla", "pallas"):
        out = np.asarray(linear(x.at[2].set(jnp.nan), weight, implementation=implementation))
        assert np.isnan(out[2]).all()
        assert np.isfinite(np.delete(out, 2, axis=0)).all()


def test_shapes_and_dtypes_are_checked() -> None:
    x, weight = problem(3, 16, 32, "float32")
    with pytest.raises(ValueError, match=r"expected one dtype and \[T, inputs\], \[outputs, inputs\]"):
        linear(x.astype(jnp.bfloat16), weight)
    with pytest.raises(ValueError, match="expected one dtype"):
        linear(x[:, :16], weight)
