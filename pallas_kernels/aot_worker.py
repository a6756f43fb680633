"""The child process of `aot.compile_kernels`: `python -m pallas_kernels.aot_worker TARGET` compiles kernels given on
stdin.

Reads a JSON list of `LoweredKernel` fields, prints a JSON list of `Report` fields. One target a process.
"""

from __future__ import annotations

import collections
import json
import re
import sys
import tempfile
from pathlib import Path


def main(target: str) -> None:
    import triton
    from triton.backends.compiler import GPUTarget

    reports = []
    with tempfile.TemporaryDirectory() as folder:
        for number, kernel in enumerate(json.load(sys.stdin)):
            source = Path(folder) / f"{number}.ttir"
            source.write_text(kernel["ir"])
            compiled = triton.compile(
                str(source),
                target=GPUTarget("hip", target, 64),
                options={"num_warps": kernel["num_warps"], "num_stages": kernel["num_stages"]},
            )
            assembly = compiled.asm["amdgcn"]
            number_of = lambda pattern, text=assembly: int((re.search(pattern, text) or [0, 0])[1])
            reports.append(
                {
                    "case": kernel["case"],
                    "kernel": kernel["name"],
                    "target": target,
                    "num_warps": kernel["num_warps"],
                    "vgprs": number_of(r"\.vgpr_count:\s*(\d+)"),
                    "sgprs": number_of(r"\.sgpr_count:\s*(\d+)"),
                    "spills": number_of(r"\.vgpr_spill_count:\s*(\d+)") + number_of(r"\.sgpr_spill_count:\s*(\d+)"),
                    "scratch_bytes": number_of(r"ScratchSize:\s*(\d+)"),
                    "lds_bytes": compiled.metadata.shared,
                    "occupancy": number_of(r"Occupancy:\s*(\d+)"),
                    "mfma": dict(sorted(collections.Counter(re.findall(r"\bv_mfma_\w+", assembly)).items())),
                }
            )
    json.dump(reports, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
