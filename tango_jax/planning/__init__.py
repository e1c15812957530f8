"""The parts of `tango_jax.plan`: a configuration and a target machine in; memory, traffic and predicted times out."""
