"""Programs are compiled with little optimization here: there are many, and each runs once."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="package")
def quick_compilation():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
