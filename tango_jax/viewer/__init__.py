"""The HTML report of `python -m tango_jax.report`: takes runs and their rollouts, writes one self-contained page."""
