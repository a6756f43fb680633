"""Every kernel compiled for AMD on any machine: registers, spills, local memory, matrix instructions.

A kernel is lowered for ROCm on the CPU (an abstract device names the chip), its Triton IR is taken out of the lowered
module, and Triton's AMD backend compiles it to the chip's machine code. XLA bundles another Triton version, so
registers are estimates; spills and the choice of matrix instruction show reliably. Each target is compiled in a
process of its own: two in one process gave wrong instructions. Needs the package `triton` (the dev group has it) and
jax 0.12.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh
from jaxlib.mlir import ir

from pallas_kernels import expert_gemm
from pallas_kernels.expert_gemm import Codes
from pallas_kernels.expert_gemm.tiles import Entry, GemmConfig, entries
from pallas_kernels.finalize import finalize
from pallas_kernels.formats import E4M3_DTYPE, FP8_BLOCK, MX_BLOCK, Rule
from pallas_kernels.linear import FEW_TOKENS, linear
from pallas_kernels.quantize import mxfp4_planes, quantize_fp8_input
from pallas_kernels.route_map import route_map
from pallas_kernels.router import Scoring, route
from pallas_kernels.target import Target, find_target

_E, _K, _H = 256, 8, 4096
# The full-size layer, for which the tables are; widths that no tile divides, and small ones. A tensor-parallel shard's
# F=512 is a shorter loop or a smaller grid of the same code. A kernel's code depends on E, K and T in nothing but its
# offsets.
_WIDTHS = ((_H, 4096), (1000, 1000), (64, 96))
_MX_WIDTHS = ((_H, 4096), (160, 96))
_MFMA = {
    "bfloat16": r"v_mfma_f32_\d+x\d+x\d+_bf16",
    "float32": r"v_mfma_f32_\d+x\d+x\d+_f32",
    "fp8": r"v_mfma_\w*(fp8_fp8|f8f6f4)",
    "mxfp4": r"v_mfma_f32_\d+x\d+x\d+_bf16",
}


@dataclasses.dataclass(frozen=True)
class AotCase:
    """A call whose kernels are to compile: `function(*arguments)`; `mfma` must match an opcode of each, if given."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    mfma: str | None = None


@dataclasses.dataclass(frozen=True)
class LoweredKernel:
    """One kernel's Triton IR as text, and how it is to be compiled."""

    case: str
    name: str
    ir: str
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What a kernel compiled to. `spills` counts registers; `mfma` counts opcodes in the code, not in the run.

    loop_mfma: matrix instructions of the main loop (the innermost with most of them). bytes_per_mfma: what a wave loads
    from memory for each of those.
    """

    case: str
    kernel: str
    target: str
    num_warps: int
    vgprs: int
    sgprs: int
    spills: int
    scratch_bytes: int
    lds_bytes: int
    occupancy: int
    loop_mfma: int
    bytes_per_mfma: float
    mfma: dict[str, int]


def cases(target: str) -> Iterator[AotCase]:
    """One case for each kernel, dtype and entry of the target's table of tiles."""
    shape = jax.ShapeDtypeStruct
    for number, entry in enumerate(entries(target)):
        yield from _gemm_cases(f"entry {number}", entry, entry.config, target)
        if entry.config.crowded is not None:
            yield from _gemm_cases(f"entry {number} crowded", entry, entry.config.crowded, target)
    for block_rows in sorted({entry.config.block_rows for entry in entries(target)}):
        yield AotCase(
            f"route_map blocks of {block_rows}",
            lambda ids, rows=block_rows: route_map(
                ids, num_experts=_E, block_rows=rows, implementation="pallas", interpret=False
            ),
            (shape((512, _K), jnp.int32),),
        )
    for dtype, (outputs, inputs) in itertools.product(
        ("bfloat16", "float32"), ((4096, 8192), (8192, 4096), (1000, 1000))
    ):
        yield AotCase(
            f"linear {dtype} {inputs} to {outputs}",
            lambda x, w: linear(x, w, implementation="pallas", interpret=False),
            (shape((FEW_TOKENS, inputs), dtype), shape((outputs, inputs), dtype)),
            _MFMA[dtype],
        )
    for rows_dtype, out_dtype in (("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("float32", "float32")):
        yield AotCase(
            f"finalize {rows_dtype} to {out_dtype}",
            lambda rows, weights, ids, gain, out=out_dtype: finalize(
                rows, weights, ids, gain, eps=1e-8, out_dtype=out, implementation="pallas", interpret=False
            ),
            (
                shape((512, _K, _H), rows_dtype),
                shape((512, _K), jnp.float32),
                shape((512, _K), jnp.int32),
                shape((_H,), jnp.bfloat16),
            ),
        )
    yield from _quantize_cases(target)
    for scoring in get_args(Scoring):
        yield AotCase(
            f"router {scoring}",
            lambda logits, bias, scoring=scoring: route(
                logits, bias, routes_per_token=_K, scoring=scoring, implementation="pallas", interpret=False
            ),
            (shape((512, _E), jnp.float32), shape((_E,), jnp.float32)),
        )


def _quantize_cases(target: str) -> Iterator[AotCase]:
    rows = (jax.ShapeDtypeStruct((512, _H), jnp.bfloat16),)
    for group in (None, FP8_BLOCK):
        yield AotCase(
            f"quantize fp8 by {group or 'row'}",
            lambda x, group=group: quantize_fp8_input(
                x, find_target(target).fp8, group=group, implementation="pallas", interpret=False
            ),
            rows,
        )
    for rule in get_args(Rule):
        yield AotCase(f"quantize mxfp4 {rule}", lambda x, rule=rule: mxfp4_planes(x, rule, interpret=False), rows)


def _gemm_cases(name: str, entry: Entry, config: GemmConfig, target: str) -> Iterator[AotCase]:
    shape = jax.ShapeDtypeStruct
    block_rows, dtype = config.block_rows, entry.dtype
    routes_count = _E * block_rows
    routes = jax.eval_shape(
        lambda ids: route_map(ids, num_experts=_E, block_rows=block_rows, implementation="xla"),
        shape((routes_count // _K, _K), jnp.int32),
    )
    widths = _MX_WIDTHS if dtype == "mxfp4" else _WIDTHS
    for h, f in widths if entry.h is None or entry.f is None else ((entry.h, entry.f),):
        fitted = config.fit(h=h, f=f)
        what = f"{dtype} H={h} F={f}, {name}, blocks of {block_rows}"
        first, second = (
            _operands(routes_count // _K, 2 * f, h, dtype, target),
            _operands(routes_count, h, f, dtype, target),
        )
        options: dict[str, Any] = {"implementation": "pallas", "interpret": False, "out_dtype": _out_dtype(dtype)}
        yield AotCase(
            f"gate_up {what}",
            lambda x, w, r, tile=fitted.gate_up, options=options: expert_gemm.gate_up(
                x, w, r, routes_per_token=_K, tile=tile, **options
            ),
            (*first, routes),
            _MFMA[dtype],
        )
        yield AotCase(
            f"down {what}",
            lambda x, w, r, tile=fitted.down, options=options: expert_gemm.down(x, w, r, tile=tile, **options),
            (*second, routes),
            _MFMA[dtype],
        )


def _out_dtype(dtype: str) -> str:
    return "float32" if dtype == "float32" else "bfloat16"


def _operands(rows: int, outputs: int, inputs: int, dtype: str, target: str) -> tuple[Any, Any]:
    """The shapes of a GEMM's input [rows, inputs] and of its weight [E, outputs, inputs]."""
    shape = jax.ShapeDtypeStruct
    if dtype == "fp8":
        code = E4M3_DTYPE[find_target(target).fp8]
        x = Codes(values=shape((rows, inputs), code), scales=shape((rows,), jnp.float32))
        weight = Codes(values=shape((_E, outputs, inputs), code), scales=shape((_E, outputs), jnp.float32))
        return x, jax.eval_shape(expert_gemm.hold, weight)
    if dtype == "mxfp4":
        values, scales = (shape((_E, outputs, inputs // each), jnp.uint8) for each in (2, MX_BLOCK))
        weight = Codes(values=values, scales=scales)
        return shape((rows, inputs), jnp.bfloat16), jax.eval_shape(expert_gemm.hold, weight)
    return shape((rows, inputs), dtype), shape((_E, outputs, inputs), dtype)


def lower(case: AotCase, target: Target) -> list[LoweredKernel]:
    """The case's kernels, lowered for a ROCm target on whatever machine this is."""
    if target.platform != "rocm":
        raise NotImplementedError(f"target is {target.name}; only gfx942 and gfx950 are compiled ahead of time")
    device = AbstractDevice(device_kind=target.name, num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        lowered = jax.jit(case.function).trace(*case.arguments).lower(lowering_platforms=("rocm",))
    module: Any = lowered.compiler_ir("stablehlo")
    return [_kernel(case.name, call) for call in _triton_calls(module.operation)]


def compile_kernels(kernels: Iterable[LoweredKernel], target: Target) -> list[Report]:
    """What each kernel compiles to for `target`, in a process of its own."""
    if importlib.util.find_spec("triton") is None:
        raise NotImplementedError("the package triton is not installed; `pip install triton` compiles kernels for AMD")
    request = json.dumps([dataclasses.asdict(kernel) for kernel in kernels])
    # The child needs Triton's compiler and nothing of JAX's devices.
    done = subprocess.run(
        [sys.executable, "-m", "pallas_kernels.aot_worker", target.name],
        input=request,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    if done.returncode:
        raise RuntimeError(f"compiling for {target.name} failed:\n{done.stderr[-2000:]}")
    return [Report(**found) for found in json.loads(done.stdout)]


def faults(report: Report, mfma: str | None = None) -> list[str]:
    """What is wrong with a compiled kernel: spills, too much local memory, no matrix instruction of the wanted type."""
    target = find_target(report.target)
    found = []
    if report.spills or report.scratch_bytes:
        found.append(f"spills {report.spills} registers, {report.scratch_bytes} bytes of scratch")
    if report.lds_bytes > target.lds_bytes:
        found.append(f"needs {report.lds_bytes} bytes of LDS, the chip has {target.lds_bytes}")
    if mfma is not None and not any(re.fullmatch(mfma, opcode) for opcode in report.mfma):
        found.append(f"has no opcode like {mfma}, but {', '.join(report.mfma) or 'none'}")
    return found


def check(targets: Sequence[str]) -> list[tuple[Report, list[str]]]:
    """Every case compiled for every target, with what is wrong with it."""
    checked = []
    for name in targets:
        target = find_target(name)
        lowered = [(kernel, case.mfma) for case in cases(name) for kernel in lower(case, target)]
        # Entries share tiles: what has the same code is compiled once.
        distinct = {_code(kernel): kernel for kernel, _ in lowered}
        compiled = dict(zip(distinct, compile_kernels(distinct.values(), target), strict=True))
        for kernel, mfma in lowered:
            report = dataclasses.replace(compiled[_code(kernel)], case=kernel.case)
            checked.append((report, faults(report, mfma)))
    return checked


def _code(kernel: LoweredKernel) -> tuple[str, int, int]:
    return kernel.ir, kernel.num_warps, kernel.num_stages


def _triton_calls(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region:
            for inner in block:
                if inner.operation.name == "stablehlo.custom_call" and "triton" in str(
                    inner.attributes["call_target_name"]
                ):
                    yield inner
                yield from _triton_calls(inner.operation)


def _kernel(case: str, call: Any) -> LoweredKernel:
    from jaxlib.triton import dialect

    config = {item.name: item.attr for item in ir.DictAttr(call.attributes["mhlo.backend_config"])}
    with ir.Context() as context:
        dialect.register_dialect(context)
        text = str(ir.Module.parse(ir.StringAttr(config["ir"]).value_bytes))
    return LoweredKernel(
        case=case,
        name=ir.StringAttr(config["name"]).value,
        ir=text,
        num_warps=ir.IntegerAttr(config["num_warps"]).value,
        num_stages=ir.IntegerAttr(config["num_stages"]).value,
    )
