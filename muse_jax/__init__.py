"""Muse Spark's mixture-of-experts block in JAX: modules, checkpoints, and a numpy truth to check them against."""
