"""What combinations of precision, chip and mesh are served, and the errors for those that are not.

    BF16     any mesh of dp, ep and tp; Pallas on a GPU, XLA anywhere
    FP8      the same; the chip's own FP8 flavour, codes converted at load where it is not the stored one
    MXFP4    the same; weights unpacked exactly, inputs quantized by a named rule or (W4A16) not at all
tp divides F and leaves whole quantization blocks on every rank: of 32 columns for MXFP4, of 128 for FP8 with scales of
blocks. Codes are those of one device over any mesh: FP8 rows that find their own scale find it over all of tp (in vLLM
each rank finds its own: spec f.1).
vLLM's AMD runner refuses data parallelism, MXFP4 on gfx942 and weights-only MXFP4; these are served here. What changes
where the reduction happens (sequence parallelism, unreduced output, weights applied before the norm) cannot be: a row
must be complete before its norm. Source: spec e.6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from muse_jax.quantization.inputs import ActivationRule
from muse_jax.schedule import ReduceDtype
from muse_jax.sharding import why_not_shared_out
from pallas_kernels.dispatch import Implementation
from pallas_kernels.formats import FP8_BLOCK, MX_BLOCK
from pallas_kernels.target import TARGETS

Precision = Literal["bf16", "fp8", "mxfp4"]
Service = Literal["native", "emulated", "refused"]

_UNPACKED = "codes are unpacked to numbers that its matrix units multiply, exactly"
_REASONS: dict[tuple[str, str], tuple[Service, str]] = {
    ("fp8", "gfx942"): ("native", "e4m3fnuz; codes are converted at load and stand for the same numbers"),
    ("fp8", "gfx950"): ("native", "e4m3fn"),
    ("fp8", "sm_90"): ("emulated", "codes multiplied in float16, exact: Pallas cannot ask Triton for the FP8 units"),
    ("mxfp4", "gfx942"): ("emulated", f"the chip has no FP4 units; {_UNPACKED}"),
    ("mxfp4", "gfx950"): ("emulated", f"Pallas on Triton cannot express the chip's FP4 units; {_UNPACKED}"),
    ("mxfp4", "sm_90"): (
        "emulated",
        f"the chip has no FP4 units; {_UNPACKED}; block scales of 4 and more are refused in bfloat16",
    ),
}


def service(precision: Precision, target: str) -> tuple[Service, str]:
    """("native", "emulated" or "refused", why) of a precision on a target of `pallas_kernels.target`, or "cpu".

    Raises ValueError for a precision that does not exist.
    """
    if precision not in get_args(Precision):
        raise ValueError(f"precision is {precision!r}; expected one of {', '.join(get_args(Precision))}")
    if target != "cpu" and target not in TARGETS:
        return "refused", f"{target} is none of {', '.join(TARGETS)}; use implementation='xla'"
    if precision == "bf16":
        return ("emulated", "XLA; kernels run interpreted") if target == "cpu" else ("native", "bfloat16")
    if target == "cpu":
        return "emulated", "XLA on numbers decoded from the codes; kernels run interpreted"
    return _REASONS[precision, target]


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """How a block is to be run.

    Attributes:
      target: "gfx942", "gfx950", "sm_90" or "cpu".
      implementation: "pallas", "xla", or None for the best there.
      expert_width: F of the model.
      num_experts: E of the model.
      dp, ep, tp: devices along each axis of the mesh.
      activation_rule: how inputs of MXFP4 experts are quantized; None is "even".
      fp8_blocks: whether FP8 weights have scales of 128 x 128 blocks.
      reduce_dtype: what sums over ep and tp are computed in.
      sequence_parallel: tokens of one sequence split over tp before the block.
      expert_rebalancing: experts moved or copied between ranks by their load (vLLM's EPLB).
      lora: adapters on the experts.
      unreduced_output: an output left to be summed over ranks by the caller (vLLM's skip_final_all_reduce).
      weight_on_input: router weights applied before the experts (vLLM's apply_router_weight_on_input).

    Raises ValueError for a size below 1 and for a value that does not exist.
    """

    target: str
    expert_width: int
    num_experts: int
    implementation: Implementation | None = None
    dp: int = 1
    ep: int = 1
    tp: int = 1
    activation_rule: ActivationRule | None = None
    fp8_blocks: bool = False
    reduce_dtype: ReduceDtype = "float32"
    sequence_parallel: bool = False
    expert_rebalancing: bool = False
    lora: bool = False
    unreduced_output: bool = False
    weight_on_input: bool = False

    def __post_init__(self) -> None:
        for name in ("expert_width", "num_experts", "dp", "ep", "tp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected 1 or more")
        for name, values in _VALUES.items():
            found = getattr(self, name)
            if found is not None and found not in values:
                raise ValueError(f"{name} is {found!r}; expected one of {', '.join(values)}")


_VALUES = {
    "implementation": get_args(Implementation),
    "activation_rule": get_args(ActivationRule),
    "reduce_dtype": get_args(ReduceDtype),
}
_UNSERVED = {
    "sequence_parallel": "rows must be complete before the norm; shard tokens over dp instead",
    "expert_rebalancing": "experts are placed in order; choose ep and leave them there",
    "lora": "expert weights are read as they are; merge the adapter into the checkpoint",
    "unreduced_output": "the sum over ranks comes before the norm, so there is no unreduced output to give",
    "weight_on_input": "router weights are applied after the norm; leave the input unweighted",
}


def validate_bf16_deployment(deployment: Deployment) -> None:
    """Raises NotImplementedError for a setting that is not served, ValueError for widths that no mesh can share out."""
    _validate(deployment, "bf16", block=1)


def validate_fp8_deployment(deployment: Deployment) -> None:
    """As `validate_bf16_deployment`, for FP8 weights and activations."""
    _validate(deployment, "fp8", block=FP8_BLOCK if deployment.fp8_blocks else 1)


def validate_mxfp4_deployment(deployment: Deployment) -> None:
    """As `validate_bf16_deployment`, for MXFP4 weights and, but for the rule "w4a16", activations."""
    _validate(deployment, "mxfp4", block=MX_BLOCK)


def _validate(deployment: Deployment, precision: Precision, *, block: int) -> None:
    name = precision.upper()
    for setting, reason in _UNSERVED.items():
        if getattr(deployment, setting):
            raise NotImplementedError(f"{name} with {setting} is not served: {reason}")
    found, reason = service(precision, deployment.target)
    if found == "refused" and deployment.implementation != "xla":
        raise NotImplementedError(f"{name} on {deployment.target} is not served by the kernels: {reason}")
    problem = why_not_shared_out(
        deployment.num_experts,
        deployment.expert_width,
        ep=deployment.ep,
        tp=deployment.tp,
        quantization_block=block,
    )
    if problem is not None:
        raise ValueError(f"{name}: {problem}")
