"""Names of GPU architectures, as JAX reports them."""

import pytest

from pallas_kernels.target import TARGETS, architecture, current_architecture, current_target, find_target


@pytest.mark.parametrize(
    "reported, name",
    [("gfx942:sramecc+:xnack-", "gfx942"), ("gfx950", "gfx950"), ("9.0", "sm_90"), (9.0, "sm_90"), ("10.0", "sm_100")],
)
def test_architecture(reported, name) -> None:
    assert architecture(reported) == name


def test_fp8_flavours_differ_between_the_amd_chips() -> None:
    assert find_target("gfx942:sramecc+:xnack-").fp8 == "e4m3fnuz"
    assert find_target("gfx950").fp8 == "e4m3fn"
    assert all(target.lds_bytes >= 65_536 for target in TARGETS.values())


def test_no_target_on_a_cpu() -> None:
    assert current_architecture() is None
    assert current_target() is None
