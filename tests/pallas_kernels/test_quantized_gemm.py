"""The expert GEMMs on FP8 and MXFP4 weights against the numpy truth: codes quantized the same way, sums in float32."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from muse_jax import experts
from muse_jax.checkpoint import QuantizedWeight
from muse_jax.quantization import QuantizedArray, quantize_fp8, quantize_mxfp4
from muse_jax.quantization.inputs import quantized_input
from muse_jax.reference import PROFILES
from muse_jax.reference import block as reference
from pallas_kernels import expert_gemm
from pallas_kernels.expert_gemm import Codes, codes
from pallas_kernels.formats import decode_e4m3
from pallas_kernels.route_map import route_map
from tests.one_program import one_program
from tests.pallas_kernels.cases import Case, row_error

CASES = (Case("one_token", 1, 2, 4, 64, 96), Case("masked", 18, 2, 5, 96, 64, masked=0.3))
# float32: sums of up to 160 products. bfloat16: a value between two bfloat16 numbers, or a code that sat between two
# codes: the second product's inputs are quantized from rounded rows, so one code may differ by one step.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2}
KINDS = ("fp8", "fp8_fnuz", "fp8_block", "fp8_static", "even", "floor", "rceil", "w4a16")


expert_rows = one_program(experts.expert_rows)


def problem(case: Case, kind: str, dtype: str):
    """(x, ids, gate_up, down, activation rule) with quantized weights."""
    rng = np.random.default_rng(len(kind))
    x = jnp.asarray(rng.standard_normal((case.tokens, case.h)), dtype)
    weights = []
    for shape in ((case.experts, 2 * case.f, case.h), (case.experts, case.h, case.f)):
        weight = jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[2]), jnp.float32)
        if kind.startswith("fp8"):
            weight = quantize_fp8(weight, "e4m3fnuz" if kind == "fp8_fnuz" else "e4m3fn")
            if kind == "fp8_static":
                weight = dataclasses.replace(weight, input_scale=jnp.float32(0.01))
            if kind == "fp8_block":
                blocks = (shape[0], -(-shape[1] // 128), -(-shape[2] // 128))
                weight = dataclasses.replace(weight, scales=jnp.asarray(rng.uniform(0.001, 0.01, blocks), jnp.float32))
        else:
            weight = quantize_mxfp4(weight)
        weights.append(weight)
    return x, jnp.asarray(case.ids()), *weights, None if kind.startswith("fp8") else kind


def truth(
    x, ids, gate_up: QuantizedArray, down: QuantizedArray, rule, activation=None
) -> tuple[np.ndarray, np.ndarray]:
    """(activation, rows) of the reference; rows from the given activation, if there is one."""
    profile = PROFILES["exact" if x.dtype == jnp.float32 else "vllm"]
    kept = np.where((np.asarray(ids) < 0) | (np.asarray(ids) >= gate_up.scales.shape[0]), -1, ids)
    made = reference.activation(np.asarray(x), kept, gate_up.to_host(), profile, rule)
    given = made if activation is None else np.where(kept[..., None] < 0, 0, np.asarray(activation))
    return made, reference.expert_rows(given.astype(made.dtype), kept, down.to_host(), profile, rule)


@pytest.mark.parametrize(
    "kind, dtype", [*((kind, "float32") for kind in KINDS), ("fp8", "bfloat16"), ("even", "bfloat16")]
)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_rows(case: Case, kind: str, dtype: str, implementation) -> None:
    if kind == "fp8_block" and (case.h % 128 or case.f % 128):
        case = dataclasses.replace(case, h=128, f=256)
    x, ids, gate_up, down, rule = problem(case, kind, dtype)
    activation, rows = expert_rows(x, ids, gate_up, down, activation_rule=rule, implementation=implementation)
    assert rows.dtype == activation.dtype == x.dtype
    masked = np.asarray((ids < 0) | (ids >= case.experts))
    assert not np.asarray(rows)[masked].any()
    made, wanted = truth(x, ids, gate_up, down, rule, activation)
    assert row_error(np.where(masked[..., None], 0, activation), made) < max(TOLERANCE[dtype], 2e-6)
    assert row_error(rows, wanted) < TOLERANCE[dtype] / (1 if dtype == "float32" else 4)


@pytest.mark.parametrize("kind", ["fp8", "fp8_static", "even"])
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_a_nan_row_touches_no_other(kind: str, implementation) -> None:
    x, ids, gate_up, down, rule = problem(CASES[1], kind, "float32")
    run = lambda x: np.asarray(
        expert_rows(x, ids, gate_up, down, activation_rule=rule, implementation=implementation)[1]
    )
    poisoned, clean = run(x.at[4, 3].set(jnp.nan)), run(x)
    assert np.isnan(poisoned[4]).any()
    np.testing.assert_array_equal(np.delete(poisoned, 4, 0), np.delete(clean, 4, 0))


@pytest.mark.parametrize("broken", ["scale_of_another_row", "nibbles_swapped", "second_input_not_quantized"])
def test_tolerance_catches_mistakes(broken: str) -> None:
    kind = "fp8" if broken == "scale_of_another_row" else "even"
    x, ids, gate_up, down, rule = problem(CASES[1], kind, "float32")
    ids = jnp.abs(ids) % 5
    wanted = truth(x, ids, gate_up, down, rule)[1]
    if broken == "scale_of_another_row":
        down = dataclasses.replace(down, scales=jnp.roll(down.scales, 1, axis=1))
    if broken == "nibbles_swapped":
        down = dataclasses.replace(down, values=(down.values >> 4) | (down.values << 4))
    if broken == "second_input_not_quantized":
        activation, _ = expert_rows(x, ids, gate_up, down, activation_rule=rule, implementation="xla")
        kept = reference.expert_rows(
            np.asarray(activation), np.asarray(ids), down.to_host(), PROFILES["exact"], "w4a16"
        )
        assert row_error(kept, wanted) > 1e-2
        return
    rows = expert_rows(x, ids, gate_up, down, activation_rule=rule, implementation="xla")[1]
    assert row_error(rows, wanted) > 1e-2


def test_one_byte_arrays_that_wrap(monkeypatch) -> None:
    """Refused as they are and right when held with an expert more, at a limit that fits a test."""
    x, ids, gate_up, down, _ = problem(Case("wraps", 3, 2, 4, 96, 64), "fp8", "float32")
    ids = ids.at[0, 0].set(-1).at[1, 1].set(4)
    wanted = expert_rows(x, ids, gate_up, down, implementation="xla")[1]
    monkeypatch.setattr(codes, "_LIMIT", down.values.size)
    with pytest.raises(ValueError, match=r"32-bit offsets cannot reach; hold them through"):
        expert_rows(x, ids, gate_up, down, implementation="pallas")
    held = down.held()
    assert held.values.shape[0] == 5
    for implementation in ("xla", "pallas"):
        rows = expert_rows(x, ids, gate_up, held, implementation=implementation)[1]
        np.testing.assert_allclose(rows, wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("weights_first", [False, True])
def test_held_words_are_the_same_numbers(dtype: str, weights_first: bool) -> None:
    """As a checkpoint has them, held, and multiplied in either order, the products are equal; every scale is kept."""
    _, ids, _, down, _ = problem(Case("words", 9, 2, 4, 96, 64), "w4a16", dtype)
    every = np.resize(np.arange(256), down.scales.shape).astype(np.uint8)
    held = dataclasses.replace(down, scales=jnp.asarray(every)).held()
    assert (held.values.dtype, held.scales.dtype) == (jnp.uint16, jnp.bfloat16)
    assert held.shape == down.shape
    back = held.to_host()
    np.testing.assert_array_equal(back.values, down.values)
    np.testing.assert_array_equal(back.scales, every)
    activation = jnp.asarray(np.random.default_rng(0).standard_normal((18, 64)), dtype)
    routes = route_map(ids, num_experts=4, block_rows=16, implementation="xla")
    tile = expert_gemm.Tile(cols=32, depth=64, num_warps=4, num_stages=2, weights_first=weights_first)
    run = lambda weight: expert_gemm.down(activation, weight.codes, routes, implementation="pallas", tile=tile)
    np.testing.assert_array_equal(run(down.held()), run(down))
    wanted = expert_gemm.down(activation, down.codes, routes, implementation="xla")
    assert row_error(run(down), wanted) < TOLERANCE[dtype] / (1 if dtype == "float32" else 4)


@pytest.mark.parametrize("kind", ["fp8", "fp8_fnuz", "fp8_block"])
@pytest.mark.parametrize("weights_first", [False, True])
def test_numbers_of_codes_are_multiplied_as_codes_are(kind: str, weights_first: bool) -> None:
    """An FP8 input in float16, as on NVIDIA, gives the rows of the codes."""
    _, ids, _, down, _ = problem(Case("numbers", 9, 2, 4, 128, 256), kind, "float32")
    activation = jnp.asarray(np.random.default_rng(0).standard_normal((18, 256)), jnp.float32)
    x = quantized_input(activation, down, implementation="xla")
    routes = route_map(ids, num_experts=4, block_rows=16, implementation="xla")
    tile = expert_gemm.Tile(cols=32, depth=64, num_warps=4, num_stages=2, weights_first=weights_first)
    flavour = "e4m3fn" if x.values.dtype == jnp.float8_e4m3fn else "e4m3fnuz"
    numbers = dataclasses.replace(x, values=decode_e4m3(x.values.view(jnp.uint8), flavour).astype(jnp.float16))
    for implementation in ("xla", "pallas"):
        run = lambda x, implementation=implementation: expert_gemm.down(
            x, down.codes, routes, out_dtype=jnp.float32, implementation=implementation, tile=tile
        )
        np.testing.assert_array_equal(run(numbers), run(x))


def test_what_does_not_fit_is_refused() -> None:
    x, ids, gate_up, down, _ = problem(CASES[0], "fp8", "float32")
    with pytest.raises(ValueError, match="only MXFP4 experts have a rule"):
        expert_rows(x, ids, gate_up, down, activation_rule="even")
    with pytest.raises(ValueError, match="activation_rule is 'up'; expected one of even, floor, rceil, w4a16"):
        expert_rows(x, ids, gate_up, down, activation_rule="up")
    weight = Codes(values=down.values, scales=down.scales)
    with pytest.raises(TypeError, match="activation goes as Codes with an FP8 weight"):
        expert_gemm.down(jnp.zeros((2, 96)), weight, None, out_dtype=jnp.float32)
    assert isinstance(down.to_host(), QuantizedWeight)
    assert down.values.dtype == ml_dtypes.float8_e4m3fn
