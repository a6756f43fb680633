"""`python -m muse_jax`, for a checkout without installation."""

from muse_jax.cli import main

raise SystemExit(main())
