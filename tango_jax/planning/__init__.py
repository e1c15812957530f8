"""The parts of `tango_jax.plan`: memory, traffic and predicted times of a configuration on a target machine."""
