"""Which combinations are served, and that each refusal names the precision, the setting and what would work."""

import pytest

from muse_jax.deployment import (
    Deployment,
    service,
    validate_bf16_deployment,
    validate_fp8_deployment,
    validate_mxfp4_deployment,
)
from pallas_kernels.target import TARGETS

VALIDATE = {"BF16": validate_bf16_deployment, "FP8": validate_fp8_deployment, "MXFP4": validate_mxfp4_deployment}


def deployment(**settings) -> Deployment:
    return Deployment(**{"target": "gfx942", "expert_width": 4096, "num_experts": 256} | settings)


@pytest.mark.parametrize("precision", VALIDATE)
@pytest.mark.parametrize("target", [*TARGETS, "cpu"])
def test_one_device_is_served_everywhere(precision: str, target: str) -> None:
    VALIDATE[precision](deployment(target=target))
    found, reason = service(precision.lower(), target)
    assert found in ("native", "emulated")
    assert reason


@pytest.mark.parametrize("precision", VALIDATE)
@pytest.mark.parametrize("sizes", [{"dp": 8}, {"ep": 8}, {"tp": 8}, {"dp": 2, "ep": 2, "tp": 2}, {"ep": 3}])
def test_any_mesh_that_leaves_whole_blocks_is_served(precision: str, sizes: dict) -> None:
    VALIDATE[precision](deployment(**sizes))


@pytest.mark.parametrize("precision", VALIDATE)
@pytest.mark.parametrize(
    "setting", ["sequence_parallel", "expert_rebalancing", "lora", "unreduced_output", "weight_on_input"]
)
def test_what_changes_the_reduction_is_refused(precision: str, setting: str) -> None:
    with pytest.raises(NotImplementedError, match=f"{precision} with {setting} is not served: ."):
        VALIDATE[precision](deployment(**{setting: True}))


def test_other_chips_and_sizes_are_refused() -> None:
    with pytest.raises(
        NotImplementedError, match=r"BF16 on gfx90a is not served by the kernels: .* implementation='xla'"
    ):
        validate_bf16_deployment(deployment(target="gfx90a"))
    validate_bf16_deployment(deployment(target="gfx90a", implementation="xla"))
    with pytest.raises(
        ValueError, match="BF16: ep is 9 and the block has E=8 experts of width F=4096; ep can be 1 to 8"
    ):
        validate_bf16_deployment(deployment(ep=9, num_experts=8))
    with pytest.raises(
        ValueError, match=r"BF16: tp is 3 and the block has E=256 experts of width F=8; tp can be 1, 2, 4, 8"
    ):
        validate_bf16_deployment(deployment(tp=3, expert_width=8))
    with pytest.raises(ValueError, match=r"MXFP4: tp is 4 .* F=96, in quantization blocks of 32; tp can be 1, 3"):
        validate_mxfp4_deployment(deployment(tp=4, expert_width=96))
    with pytest.raises(ValueError, match=r"FP8: tp is 2 .* F=384, in quantization blocks of 128; tp can be 1, 3"):
        validate_fp8_deployment(deployment(tp=2, expert_width=384, fp8_blocks=True))
    with pytest.raises(ValueError, match="activation_rule is 'up'; expected one of even, floor, rceil, w4a16"):
        deployment(activation_rule="up")
    with pytest.raises(ValueError, match="implementation is 'triton'; expected one of"):
        deployment(implementation="triton")
    with pytest.raises(ValueError, match="reduce_dtype is 'float16'; expected one of float32, bfloat16"):
        deployment(reduce_dtype="float16")
    with pytest.raises(ValueError, match="dp is 0; expected 1 or more"):
        deployment(dp=0)
    with pytest.raises(ValueError, match="precision is 'int8'; expected one of bf16, fp8, mxfp4"):
        service("int8", "gfx942")


def test_how_each_precision_is_served() -> None:
    served = {target: [service(precision, target)[0] for precision in ("bf16", "fp8", "mxfp4")] for target in TARGETS}
    assert served == {
        "gfx942": ["native", "native", "emulated"],
        "gfx950": ["native", "native", "emulated"],
        "sm_90": ["native", "emulated", "emulated"],  # its FP8 kernels compile to products of float16
    }
    assert {service(precision, "cpu")[0] for precision in ("bf16", "fp8", "mxfp4")} == {"emulated"}
    assert "e4m3fnuz" in service("fp8", "gfx942")[1]
    assert "FP4 units" in service("mxfp4", "gfx950")[1]
    assert service("mxfp4", "gfx90a")[0] == "refused"
