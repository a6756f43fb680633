"""Written quantized checkpoints load through the real loader, with the codes of the weights they were made from."""

import numpy as np
import pytest

from muse_jax.checkpoint import load_layer, small_config, take_inventory, write_random_checkpoint
from muse_jax.quantization import online_layers, quantize_fp8, quantize_mxfp4, write_quantized_checkpoint
from tests.quantization.test_arrays import assert_same

CONFIG = small_config(latent_width=64, expert_width=96, num_experts=5, num_layers=4)
FORMATS = pytest.mark.parametrize("format, quantize", [("fp8", quantize_fp8), ("mxfp4", quantize_mxfp4)])


@FORMATS
def test_it_loads_what_was_quantized(tmp_path, format, quantize):
    folder = write_quantized_checkpoint(tmp_path / "ckpt", config=CONFIG, format=format, seed=3, shards=4)
    plain = write_random_checkpoint(tmp_path / "plain", config=CONFIG, seed=3)
    inventory = take_inventory(folder)
    assert (inventory.faults, inventory.conflicts) == ((), ())
    assert [layer.label for layer in inventory.layers] == ["bf16", format, format, "bf16"]
    for layer in range(4):
        ours, weights = load_layer(folder, layer), load_layer(plain, layer)
        for name, weight in weights.items():
            if name in ("gate_up", "down") and 0 < layer < 3:
                assert_same(ours[name], quantize(weight))
            else:
                np.testing.assert_array_equal(ours[name], weight)


def test_online_quantization_leaves_the_first_and_the_last_layer():
    assert online_layers(CONFIG) == (1, 2)
    assert online_layers(small_config(num_layers=2)) == ()


def test_chosen_layers(tmp_path):
    folder = write_quantized_checkpoint(tmp_path / "ckpt", config=CONFIG, format="fp8", layers=[0, 3])
    assert [layer.label for layer in take_inventory(folder).layers] == ["fp8", "bf16", "bf16", "fp8"]


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(format="int4"), "format is 'int4'; expected 'fp8' or 'mxfp4'"),
        (dict(format="fp8", layers=[4]), "layer is 4; expected 0 to 3"),
        (dict(format="mxfp4", config=small_config(latent_width=40)), None),
    ],
)
def test_refusals(tmp_path, options, message):
    options = {"config": CONFIG} | options
    if message is None:
        options["layers"], message = [0], "40 columns; MXFP4 needs a multiple of 32"
    with pytest.raises(ValueError, match=message):
        write_quantized_checkpoint(tmp_path / "ckpt", **options)
    assert not (tmp_path / "ckpt").exists()
