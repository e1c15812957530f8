"""What a run needs of a machine, found without the machine: see `python -m tango_jax.plan --help`."""
