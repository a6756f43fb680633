"""Where two implementations part and why: dump files, aligned routes, errors by boundary, rounding profiles that
fit.
"""

from muse_jax.compare.dumps import Dump, read_dump, write_dump
from muse_jax.compare.walk import BoundaryReport, LayerReport, Limits, compare_layers

__all__ = ["BoundaryReport", "Dump", "LayerReport", "Limits", "compare_layers", "read_dump", "write_dump"]
