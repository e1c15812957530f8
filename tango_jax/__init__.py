"""RL Tango in JAX and Flax: a generator and a verifier language model, trained together with reinforcement learning.

Nothing is imported here, so that `import tango_jax` starts no backend and a program can still set its XLA flags.
Start reading at `tango_jax/train.py`.
"""

__version__ = "0.1.0"
