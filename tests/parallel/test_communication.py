"""Predicted collectives against those that the compiled program has, count by count."""

from collections import Counter

import pytest

from muse_jax.communication import Collective, collectives, sent_bytes
from muse_jax.schedule import Schedule
from tests.parallel import hlo
from tests.parallel.cases import BFLOAT16, CHUNKED, FLOAT32, MESHES, WIDE, compiled
from tests.parallel.test_parallel import config_of


def predicted(shape, count, config, dtype, schedule, *, ranks=True, fp8_row_scales=False):
    sizes = dict(zip(("dp", "ep", "tp"), shape, strict=True))
    found = Counter()
    options = {"dtype": dtype.name, "schedule": schedule, "fp8_row_scales": fp8_row_scales}
    for one in collectives(config, count, **sizes, **options):
        found[one.operation, one.ranks * ranks, one.shape, one.dtype] += one.times
    return found


@pytest.mark.parametrize("count", [0, 1, 7, 256, 1100])
@pytest.mark.parametrize("shape", [pytest.param(s, marks=pytest.mark.xdist_group(str(s))) for s in MESHES])
def test_compiled_collectives_are_the_predicted_ones(shape, count):
    config = config_of(shape)
    _, program = compiled(shape, count, config=config)
    assert hlo.collectives(program.as_text()) == predicted(shape, count, config, FLOAT32, CHUNKED)


@pytest.mark.parametrize(
    "shape, reduce_dtype", [((2, 2, 2), "bfloat16"), ((1, 1, 8), "bfloat16"), ((1, 8, 1), "bfloat16")]
)
def test_bfloat16_travels_as_bfloat16(shape, reduce_dtype):
    """What is asked of the compiler; a CPU's own collectives then widen bfloat16."""
    schedule = Schedule(reduce_dtype=reduce_dtype, scatter_min_tokens=32)
    lowered, _ = compiled(shape, 64, BFLOAT16, schedule, WIDE, ("combined",))
    asked = hlo.asked_collectives(lowered.as_text())
    assert asked == predicted(shape, 64, WIDE, BFLOAT16, schedule, ranks=False)


def test_bytes():
    one = Collective(operation="all-reduce", axis="tp", ranks=8, shape=(1, 8, 4096), dtype="float32", times=3)
    assert one.nbytes == 2**17
    assert one.sent_bytes == 3 * 2 * 2**17 * 7 / 8
    scatter = Collective(operation="reduce-scatter", axis="tp", ranks=4, shape=(8, 2), dtype="bfloat16")
    assert sent_bytes([one, scatter]) == one.sent_bytes + 32 * 3 / 4
