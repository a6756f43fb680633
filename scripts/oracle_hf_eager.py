"""Boundaries of a checkpoint's MoE blocks by transformers' eager experts, in bfloat16, for the tests of `hf_eager`.

    combined = running bfloat16 sum over the experts, ascending, of bfloat16(topk_weights * normed_rows)

Needs torch and transformers 5.24 (a Python environment of its own), nothing of this project:

    python scripts/oracle_hf_eager.py tests/data/hf-tiny/checkpoint tests/data/hf-tiny/moe_bf16.safetensors \
        tests/data/hf-tiny/moe_bf16_eager.safetensors
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers.models.muse_spark.configuration_muse_spark import MuseSparkTextConfig
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkMoE


def load_moe(checkpoint: Path, layer: int) -> MuseSparkMoE:
    """The layer's block with the checkpoint's weights in their own dtypes and eager experts."""
    text = json.loads((checkpoint / "config.json").read_text())["text_config"]
    config = MuseSparkTextConfig(**text)
    config._experts_implementation = "eager"
    files = json.loads((checkpoint / "model.safetensors.index.json").read_text())["weight_map"]
    prefix = f"model.language_model.layers.{layer}.mlp."
    state = {}
    for name in (name for name in files if name.startswith(prefix)):
        with safe_open(checkpoint / files[name], "pt") as shard:
            state[name.removeprefix(prefix)] = shard.get_tensor(name)
    moe = MuseSparkMoE(config).eval()
    moe.load_state_dict(state, assign=True)
    return moe


@torch.no_grad()
def run(moe: MuseSparkMoE, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """topk_ids, topk_weights [T, K]; expert_rows, normed_rows [T, K, H]; combined [T, H]; out [T, D]."""
    seen: dict[str, torch.Tensor] = {}
    rows: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep_routes(_module, _args, output):
        seen["topk_weights"], seen["topk_ids"] = output[1], output[2].int()

    def keep_rows(_module, args, output):
        rows.append((args[0], output))

    def keep_combined(_module, _args, output):
        seen["combined"] = output

    hooks = [
        moe.gate.register_forward_hook(keep_routes),
        moe.experts.post_expert_norm.register_forward_hook(keep_rows),
        moe.experts.register_forward_hook(keep_combined),
    ]
    seen["out"] = moe(x)
    for hook in hooks:
        hook.remove()
    tokens, routes = seen["topk_ids"].shape
    by_slot = seen["topk_ids"].T.reshape(-1)
    order = torch.argsort(by_slot, stable=True)  # the eager experts walk experts, then slots, then tokens
    for name, parts in (("expert_rows", [before for before, _ in rows]), ("normed_rows", [after for _, after in rows])):
        walked = torch.cat(parts)
        placed = torch.empty_like(walked)
        placed[order] = walked
        seen[name] = placed.reshape(routes, tokens, -1).transpose(0, 1)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="checkpoint folder")
    parser.add_argument("inputs", type=Path, help="safetensors file with L.x, bfloat16")
    parser.add_argument("out", type=Path, help="safetensors file to write")
    args = parser.parse_args()
    inputs = load_file(args.inputs)
    tensors = {}
    for layer in sorted(int(name.split(".")[0]) for name in inputs if name.endswith(".x")):
        for name, value in run(load_moe(args.checkpoint, layer), inputs[f"{layer}.x"]).items():
            tensors[f"{layer}.{name}"] = value.contiguous().clone()
    save_file(tensors, args.out)


if __name__ == "__main__":
    main()
