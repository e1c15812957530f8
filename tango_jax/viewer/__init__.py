"""The HTML report of `python -m tango_jax.report`: one self-contained page about runs and their rollouts."""
