"""Router logits in float32, on the block's own wide input (before the squeeze to the latent width).

router_logits = (x @ W.T) * output_multiplier            x widened to float32, float32 products and sums
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32


def router_logits(
    x: Float[Array, "T D"], weight: Float32[Array, "E D"], output_multiplier: float
) -> Float32[Array, "T E"]:
    """Logits of every expert, [T, E] float32. Source: spec b step 1 and b.1 (the multiplier commutes with the
    product).
    """
    with jax.named_scope("router_logits"):
        logits = lax.dot_general(
            x.astype(jnp.float32),
            weight,
            (((1,), (1,)), ((), ())),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        return logits * jnp.float32(output_multiplier)
