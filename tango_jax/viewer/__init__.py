"""The HTML report of `python -m tango_jax.report`: runs and their rollouts in, one page that opens from disk out."""
