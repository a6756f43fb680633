"""Times transformers' Muse Spark experts on the CPU: the other side of `cpu_experts.py`, which starts it.

Needs its own environment (Python 3.11; torch 2.13, transformers 5.24) and reads one JSON request on stdin:
{"sizes": [E, K, H, F], "tokens": [...], "repeats": N}. Prints one JSON object: {T: {implementation: milliseconds}}.
"""

import json
import statistics
import sys
import time

import torch
import transformers
from transformers.models.muse_spark.configuration_muse_spark import MuseSparkTextConfig
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts


def main() -> None:
    request = json.load(sys.stdin)
    experts, routes, h, f = request["sizes"]
    torch.manual_seed(0)
    torch.set_num_threads(request["threads"])
    config = MuseSparkTextConfig(
        num_local_experts=experts, num_experts_per_tok=routes, moe_hidden_size=h, moe_intermediate_size=f
    )
    module = MuseSparkExperts(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.03)
    times: dict[int, dict[str, float]] = {}
    with torch.inference_mode():
        for tokens in request["tokens"]:
            x = torch.randn(tokens, h)
            ids = torch.stack([torch.randperm(experts)[:routes] for _ in range(tokens)])
            weights = torch.rand(tokens, routes)
            times[tokens] = {}
            for implementation in ("eager", "batched_mm", "grouped_mm"):
                if implementation == "batched_mm" and tokens > 16:
                    continue  # it gathers a copy of the weights for every route: gigabytes from 128 tokens on
                config._experts_implementation = implementation
                module(x, ids, weights)
                laps = []
                for _ in range(request["repeats"]):
                    start = time.perf_counter()
                    module(x, ids, weights)
                    laps.append(time.perf_counter() - start)
                times[tokens][implementation] = 1e3 * statistics.median(laps)
    json.dump({"torch": torch.__version__, "transformers": transformers.__version__, "times": times}, sys.stdout)


if __name__ == "__main__":
    main()
