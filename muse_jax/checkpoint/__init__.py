"""Checkpoints of Muse Spark: what their files hold, and one layer's MoE weights out of them.

load_layer(path, layer)       one layer's weights as numpy arrays, quantized experts as `QuantizedWeight`
to_fnuz(weight)               FP8 for chips that multiply e4m3fnuz
take_inventory(path)          what every layer holds, from headers alone
write_random_checkpoint(...)  a small checkpoint with real names and random values
"""

from muse_jax.checkpoint.inventory import take_inventory
from muse_jax.checkpoint.load import load_layer
from muse_jax.checkpoint.quantized import QuantizedWeight, to_fnuz
from muse_jax.checkpoint.synthetic import small_config, write_random_checkpoint

__all__ = ["QuantizedWeight", "load_layer", "small_config", "take_inventory", "to_fnuz", "write_random_checkpoint"]
