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

_WAVEFRONT = 64
_LOAD = re.compile(
    r"\b(?:global|buffer|flat)_load_(?:lds_)?(dwordx[234]|dword|[us]?short\w*|[us]?byte\w*|[bu](?:8|16|32|64|96|128))\b"
)
_BYTES = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}


def main_loop(assembly: str) -> list[str]:
    """The lines of the innermost loop with most matrix instructions; empty where no loop has one.

    A loop is what lies between a label and a later branch to it.
    """
    lines = assembly.splitlines()
    label_at = {match[1]: at for at, line in enumerate(lines) if (match := re.match(r"(\.LBB\w+):", line))}
    loops = []
    for at, line in enumerate(lines):
        match = re.search(r"\bs_c?branch\w*\s+(\.LBB\w+)", line)
        if match and label_at.get(match[1], at) < at:
            loops.append((label_at[match[1]], at))
    inner = [
        one for one in loops if not any(one != other and one[0] <= other[0] and other[1] <= one[1] for other in loops)
    ]
    bodies = [lines[first : last + 1] for first, last in inner]
    return max(bodies, key=_matrix_instructions, default=[]) if any(map(_matrix_instructions, bodies)) else []


def _matrix_instructions(lines: list[str]) -> int:
    return sum("v_mfma_" in line for line in lines)


def _bytes_per_mfma(lines: list[str]) -> float:
    """Bytes that a wave loads from memory for each of its matrix instructions."""
    widths = [match[1] for line in lines if (match := _LOAD.search(line))]
    loaded = sum(_BYTES.get(width, 2 if "short" in width else 1) for width in widths) * _WAVEFRONT
    return loaded / max(1, _matrix_instructions(lines))


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
            loop = main_loop(assembly)
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
                    "loop_mfma": _matrix_instructions(loop),
                    "bytes_per_mfma": _bytes_per_mfma(loop),
                    "mfma": dict(sorted(collections.Counter(re.findall(r"\bv_mfma_\w+", assembly)).items())),
                }
            )
    json.dump(reports, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
