"""Every format on every (dp, ep, tp) of eight devices, all token counts, against one device, in float32 and bfloat16.

Run by hand, in about half an hour: `python -m tests.parallel.quantized_grid`. The suite runs a part of it.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.parallel.cases import BFLOAT16, MESHES, TOKENS, relative_error, rounding_bound, tokens
from tests.parallel.quantized_cases import FORMS, compile_run, config_of, one_device, sharded, truth
from tests.reference.checks import row_errors


def errors_in_float32(form, shape):
    """Of a row of out, the worst, at each token count."""
    config = config_of(form, shape[2])
    x, _ = truth(form, max(TOKENS), config)
    block, expected = sharded(form, shape), run(one_device(form, config), x)["out"]
    for count in TOKENS:
        out = compile_run(block, x[:count])(block.weights(), jnp.asarray(x[:count]))["out"]
        yield np.max(row_errors(np.asarray(out), expected[:count]), initial=0)


def errors_in_bfloat16(form, shape):
    """Of combined as a whole, as a part of its bound, at each token count."""
    config = config_of(form, shape[2])
    block, one = sharded(form, shape, BFLOAT16), one_device(form, config, BFLOAT16)
    for count in TOKENS[1:]:
        x = tokens(count, BFLOAT16, config)
        ours = compile_run(block, x, ("combined",))(block.weights(), jnp.asarray(x))["combined"]
        yield relative_error(ours, run(one, x)["combined"]) / max(1e-4, rounding_bound(shape, ours.size))


def run(block, x):
    return jax.tree.map(np.asarray, nnx.jit(lambda block, x: block.boundaries(x))(block, jnp.asarray(x)))


def main(forms):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    for errors in (errors_in_float32, errors_in_bfloat16):
        worst = {}
        for form in forms:
            for shape in MESHES:
                found = list(errors(form, shape))
                worst[form] = max([worst.get(form, 0), *found])
                print(errors.__name__, form, shape, *(f"{error:.2g}" for error in found), flush=True)
        print("worst of", errors.__name__, {form: f"{error:.2g}" for form, error in worst.items()})


if __name__ == "__main__":
    main(sys.argv[1:] or FORMS)
