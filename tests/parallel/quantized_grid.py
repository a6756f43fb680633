"""Every format on every (dp, ep, tp) of eight devices, all token counts, against one device: worst errors of a row.

Run by hand, in about 15 minutes: `python -m tests.parallel.quantized_grid`. The suite runs a part of it.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

from muse_jax.moe import MuseMoE
from tests.parallel.cases import FLOAT32, MESHES, TOKENS
from tests.parallel.quantized_cases import (
    FORMS,
    compile_run,
    config_of,
    rule_of,
    sharded,
    truth,
    weights,
)
from tests.reference.checks import row_errors


def one_device(form, config):
    block = MuseMoE.from_weights(
        config, weights(form, config), dtype=FLOAT32, activation_rule=rule_of(form), implementation="xla"
    )
    return np.asarray(jax.jit(lambda x: block(x))(jnp.asarray(truth(form, max(TOKENS), config)[0])))


def main(forms):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    worst = {}
    for form in forms:
        expected = {}
        for shape in MESHES:
            config = config_of(form, shape[2])
            if config not in expected:
                expected[config] = one_device(form, config)
                error = np.max(row_errors(expected[config], truth(form, max(TOKENS), config)[1]))
                print(f"{form}, one device against the truth: {error:.1e}")
            found = []
            for count in TOKENS:
                block, x = sharded(form, shape), truth(form, count, config)[0]
                out = np.asarray(compile_run(block, x)(block.weights(), jnp.asarray(x))["out"])
                found.append(np.max(row_errors(out, expected[config][:count]), initial=0))
            worst[form] = max([worst.get(form, 0), *found])
            errors = (f"T={count} {error:.1e}" for count, error in zip(TOKENS, found, strict=True))
            print(f"{form} {shape}:", *errors, flush=True)
    print("worst:", {form: f"{error:.1e}" for form, error in worst.items()})


if __name__ == "__main__":
    main(sys.argv[1:] or FORMS)
