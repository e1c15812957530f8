"""RL Tango in JAX and Flax: a generator and a verifier language model, trained together with reinforcement learning.

Nothing that imports jax is imported here, so that `import tango_jax` starts no backend and a program can still set its
XLA flags. Start reading at `tango_jax/train.py`.
"""

import os

from tango_jax.runtime import termination

__version__ = "0.1.0"

# transformers is used for tokenizers and configurations, for which it needs no PyTorch; it would say so every time.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

# The imports of a command take seconds, and a machine may be taken away during them.
if termination.is_command():
    termination.watch()
