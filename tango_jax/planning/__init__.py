"""The parts of `tango_jax.plan`: a configuration and a target machine in; memory, traffic and predicted times out. Also
those of `tango_jax.bench --model`, which holds the same arithmetic against measured times.
"""
