"""Muse Spark's mixture-of-experts block in JAX: modules, checkpoints, and a numpy truth to check them against."""

__version__ = "0.1.0"
