"""Every test runs on the CPU (kernels interpreted) unless JAX_PLATFORMS says otherwise; JAX's strict modes are on.

The CPU shows itself as eight devices, so that meshes can be tested; what names none runs on the first.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of a test's time is compiling: LLVM is asked for plain code.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 "
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
).strip()

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
# Started here: a command under test asks for as many devices as its own mesh has, if it is the first to start JAX.
jax.devices()
