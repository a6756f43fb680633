"""The block on every mesh of eight devices against one device, and what must not pass for it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from muse_jax import parallel
from muse_jax.checkpoint import small_config
from muse_jax.checkpoint.synthetic import random_layer
from muse_jax.dump import block_settings
from muse_jax.experts import expert_rows
from muse_jax.moe import MuseMoE
from muse_jax.parallel import ShardedMoE
from muse_jax.reference import run_block
from muse_jax.schedule import Schedule
from muse_jax.sharding import BlockMesh
from tests.parallel.cases import (
    BFLOAT16,
    CONFIG,
    EVEN,
    FLOAT32,
    MESHES,
    TOKENS,
    WIDE,
    compiled,
    expected,
    found,
    make_mesh,
    relative_error,
    rounding_bound,
    run,
    sharded,
    tokens,
    weights,
)
from tests.reference.checks import row_errors

# Row by row; the sums over tp and ep are float32 and in another order.
F32 = 2e-6


def config_of(shape):
    """E=9 is uneven over any ep but 1; E=8 where every rank of ep=8 has one expert."""
    return EVEN if shape[1] == 8 else CONFIG


@pytest.mark.parametrize("count", TOKENS)
@pytest.mark.parametrize("shape", [pytest.param(s, marks=pytest.mark.xdist_group(str(s))) for s in MESHES])
def test_float32_equals_one_device(shape, count):
    config = config_of(shape)
    out = run(shape, count, config=config)
    assert out.shape == (count, config.model_width)
    assert np.max(row_errors(out, expected(count, config=config)), initial=0) < F32


def reference_combined(shape, x, reduce_dtype="float32"):
    """combined of the numpy truth, rounded as that many ranks of ep and tp round."""
    cast = {name: w if name.startswith("router_") else w.astype(BFLOAT16) for name, w in weights(WIDE).items()}
    ranks = {"ep": shape[1], "tp": shape[2], "reduce_dtype": reduce_dtype}
    return run_block(cast, x, block_settings(WIDE), "vllm", **ranks)["combined"]


@pytest.mark.parametrize("count", [count for count in TOKENS if count])
@pytest.mark.parametrize("shape", [pytest.param(s, marks=pytest.mark.xdist_group(str(s))) for s in MESHES])
def test_bfloat16_rounds_as_ranks_do(shape, count):
    """Against the truth with as many ranks: a float32 sum in another order moves one element in a thousand by an ulp,
    2^-8 to 2^-7 of it, and one of `latent` in a token of a hundred, all of whose row then moves by 5e-3.
    Against one device: the roundings that ranks add, and no more.
    """
    x = tokens(count, BFLOAT16, WIDE)
    schedule = Schedule(chunk_elements=260 * WIDE.routes_per_token * WIDE.latent_width)
    combined = found(shape, count, BFLOAT16, schedule, WIDE, names=("combined",))["combined"]
    assert combined.dtype == BFLOAT16
    assert relative_error(combined, reference_combined(shape, x)) < 6e-4
    assert relative_error(combined, reference_combined((1, 1, 1), x)) < max(6e-4, rounding_bound(shape, combined.size))


# T=64, H=F=1024, E=16, K=8, random weights: what the bounds of spec i were measured with, and on these ranks.
MEASURED = small_config(model_width=256, latent_width=1024, expert_width=1024, num_experts=16, routes_per_token=8)


@pytest.mark.parametrize(
    "shape, reduce_dtype, bound",
    [
        ((1, 1, 8), "float32", 3.2e-3),
        ((4, 1, 2), "float32", 3.2e-3),
        ((1, 1, 8), "bfloat16", 4.9e-3),
        ((4, 1, 2), "bfloat16", 3.6e-3),
        ((1, 8, 1), "float32", 2.7e-3),
    ],
)
def test_bfloat16_is_within_the_measured_bounds(shape, reduce_dtype, bound):
    schedule = Schedule(reduce_dtype=reduce_dtype, scatter_min_tokens=32)
    x = jnp.asarray(np.random.default_rng(64).normal(size=(64, MEASURED.model_width)), jnp.bfloat16)
    layer = random_layer(MEASURED, 0, seed=3, dtype="float32")
    one = MuseMoE.from_weights(MEASURED, layer)
    many = ShardedMoE.from_weights(MEASURED, layer, make_mesh(shape), schedule=schedule)
    run = nnx.jit(lambda block, x: block.boundaries(x)["combined"])
    assert relative_error(run(many, x), run(one, x)) < bound


@pytest.mark.parametrize("shape, limit", [((2, 2, 2), 2.7e-3 + 4.9e-3), ((1, 1, 8), 4.9e-3), ((1, 8, 1), 4e-3)])
def test_bfloat16_reduction(shape, limit):
    """A bfloat16 sum may be rounded after every rank or once (a CPU sums in float32 and rounds once)."""
    x = tokens(64, BFLOAT16, WIDE)
    schedule = Schedule(reduce_dtype="bfloat16", scatter_min_tokens=32)
    combined = found(shape, 64, BFLOAT16, schedule, WIDE, names=("combined",))["combined"]
    one = reference_combined((1, 1, 1), x)
    assert relative_error(combined, one) < limit
    assert relative_error(combined, one) < 1.02 * relative_error(reference_combined(shape, x, "bfloat16"), one)


# --- what must not pass for the block: each variant replaces one part of it


def every_token_finalized(weights, rows, topk_weights, ids, chunk, settings, *, tp, ep):
    """`_finalize` without scattering, with the sums over tp and ep given."""
    combined = parallel.combine(weights, tp(rows), topk_weights, ids, settings.config)
    return ep(combined)


def first_rank_only(axis):
    return lambda value: lax.psum(jnp.where(lax.axis_index(axis) == 0, value, jnp.zeros_like(value)), axis)


def norm_on_partial_rows(monkeypatch):
    both = lambda combined: lax.psum(combined, ("ep", "tp"))
    broken = lambda *args: every_token_finalized(*args, tp=lambda rows: rows, ep=both)
    monkeypatch.setattr(parallel, "_finalize", broken)


def tp_not_summed(monkeypatch):
    broken = lambda *args: every_token_finalized(
        *args, tp=first_rank_only("tp"), ep=lambda combined: lax.psum(combined, "ep")
    )
    monkeypatch.setattr(parallel, "_finalize", broken)


def ep_not_summed(monkeypatch):
    broken = lambda *args: every_token_finalized(*args, tp=lambda rows: lax.psum(rows, "tp"), ep=first_rank_only("ep"))
    monkeypatch.setattr(parallel, "_finalize", broken)


def weights_of_local_routes(monkeypatch):
    combine = parallel.combine

    def broken(weights, rows, topk_weights, ids, *args, **options):
        local = jnp.where(ids >= 0, topk_weights, 0.0)
        total = jnp.sum(local, axis=1, keepdims=True)
        return combine(weights, rows, jnp.where(total > 0, local / total, 0.0), ids, *args, **options)

    monkeypatch.setattr(parallel, "combine", broken)


def global_id_as_local(monkeypatch):
    """Ids of other ranks are masked, and the rank's own are not shifted: those of the first rank stay right."""

    def broken(topk_ids, is_token, settings):
        rank = lax.axis_index("ep")
        first, end = jnp.array([0, 5])[rank], jnp.array([5, 9])[rank]
        return jnp.where((topk_ids >= first) & (topk_ids < end), topk_ids, -1)

    monkeypatch.setattr(parallel, "_local_ids", broken)


def bfloat16_reduction(monkeypatch):
    cast = parallel._cast
    monkeypatch.setattr(parallel, "_cast", lambda value, dtype: cast(value, "bfloat16").astype(dtype))


def remote_rows_unmasked(monkeypatch):
    """The rows of other ranks' routes hold NaN, as a kernel that leaves them unwritten may, and nothing masks them."""
    unwritten_remote_rows(monkeypatch)
    combine = parallel.combine
    broken = lambda weights, rows, topk_weights, ids, *args, **options: combine(
        weights, rows, topk_weights, jnp.zeros_like(ids), *args, **options
    )
    monkeypatch.setattr(parallel, "combine", broken)


def unwritten_remote_rows(monkeypatch):
    def poisoned(inputs, ids, *args, **options):
        return tuple(
            jnp.where((ids >= 0)[:, :, None], value, jnp.full_like(value, jnp.nan))
            for value in expert_rows(inputs, ids, *args, **options)
        )

    monkeypatch.setattr(parallel, "expert_rows", poisoned)


def unpatched(monkeypatch):
    pass


VARIANTS = [
    (unpatched, True),
    (unwritten_remote_rows, True),
    (norm_on_partial_rows, False),
    (tp_not_summed, False),
    (ep_not_summed, False),
    (weights_of_local_routes, False),
    (global_id_as_local, False),
    (bfloat16_reduction, False),
    (remote_rows_unmasked, False),
]


@pytest.mark.parametrize("variant, is_right", VARIANTS, ids=[variant.__name__ for variant, _ in VARIANTS])
def test_only_the_right_block_passes(variant, is_right, monkeypatch):
    variant(monkeypatch)
    _, program = compiled.__wrapped__((1, 2, 2), 6)
    out = program(sharded((1, 2, 2)).weights(), jnp.asarray(tokens(6)))["out"]
    error = np.max(row_errors(np.asarray(out), expected(6)))
    assert (error < F32) == is_right


def test_routes_to_one_rank_and_to_none(monkeypatch):
    """Every route on the experts of one ep rank: the others have no row, and still enter every sum."""
    bias = np.where(np.arange(CONFIG.num_experts) < 3, 5.0, -5.0).astype(np.float32)
    changed = weights() | {"router_bias": bias}
    x = tokens(7)
    one = MuseMoE.from_weights(CONFIG, changed, dtype=FLOAT32)
    found = ShardedMoE.from_weights(CONFIG, changed, make_mesh((1, 4, 2)), dtype=FLOAT32).boundaries(x)
    assert found["topk_ids"].max() < 3
    for name, value in one.boundaries(jnp.asarray(x)).items():
        assert np.max(row_errors(np.asarray(found[name]).reshape(7, -1), np.asarray(value).reshape(7, -1))) < F32, name


def test_a_nan_token_touches_no_other():
    x = np.array(tokens(7))
    x[4] = np.nan
    block = sharded((2, 2, 2), schedule=Schedule(scatter_min_tokens=1))
    clean, got = np.asarray(block(tokens(7))), np.asarray(block(x))
    others = np.arange(7) != 4
    np.testing.assert_array_equal(got[others], clean[others])
    assert np.isnan(got[4]).all()


# --- how it is used


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_leading_axes_and_sharded_inputs(kind):
    """x keeps its shape; it may come in split any way, and goes out split over the first axis that dp divides."""
    block = sharded((2, 2, 2), kind=kind)
    x = jnp.asarray(tokens(12).reshape(3, 4, -1))
    want = expected(12).reshape(3, 4, -1)
    mesh = block.mesh.mesh
    for spec in (PartitionSpec(), PartitionSpec(None, "dp"), PartitionSpec(None, ("tp", "ep"), None)):
        out = jax.jit(lambda block, x: block(x))(block, jax.device_put(x, NamedSharding(mesh, spec)))
        assert out.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec(None, "dp")), 3)
        assert np.max(row_errors(np.asarray(out), want)) < F32


def test_jit_with_state_split_from_graph():
    block, x = sharded((2, 2, 2)), tokens(7)
    graph, state = nnx.split(block)
    out = jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, x)
    np.testing.assert_array_equal(out, nnx.jit(lambda block, x: block(x))(block, x))


def test_other_names_and_other_axes():
    """tp over two axes of the mesh, dp by another name, and an axis that belongs to something else."""
    mesh = make_mesh((2, 2, 2), ("data", "rack", "chip"))
    rules = BlockMesh(mesh=mesh, rules={"dp": "data", "tp": ("rack", "chip")})
    assert (rules.size("dp"), rules.size("ep"), rules.size("tp")) == (2, 1, 4)
    unused = BlockMesh(mesh=mesh, rules={"ep": "chip"})
    for block_mesh in (rules, unused):
        block = ShardedMoE.from_weights(CONFIG, weights(), block_mesh, dtype=FLOAT32)
        assert np.max(row_errors(np.asarray(block(tokens(7))), expected(7))) < F32


def test_pallas_on_a_mesh():
    block = sharded((2, 2, 2), implementation="pallas", schedule=Schedule(scatter_min_tokens=1))
    x = tokens(7)
    assert np.max(row_errors(np.asarray(block(x)), expected(7))) < F32
    with pytest.raises(NotImplementedError, match="has no derivative; use implementation='xla'"):
        jax.grad(lambda x: jnp.sum(block(x)))(jnp.asarray(x))


def test_errors_name_what_does_not_fit():
    with pytest.raises(ValueError, match=r"held\['gate_up'\] is \(9, 2, 16, 12\); expected \(10, 2"):
        ShardedMoE(CONFIG, sharded((1, 1, 8)).weights(), sharded((1, 2, 4)).mesh)
    with pytest.raises(TypeError, match="x is bfloat16 and the parameters are float32; cast x"):
        sharded((1, 1, 8))(tokens(7, BFLOAT16))
    with pytest.raises(ValueError, match="implementation is 'cuda'; expected 'pallas' or 'xla'"):
        ShardedMoE.from_weights(CONFIG, weights(), make_mesh((8,), ("tp",)), implementation="cuda")
