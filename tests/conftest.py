"""Every test runs on the CPU (kernels interpreted) unless JAX_PLATFORMS says otherwise; JAX's strict modes are on."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
