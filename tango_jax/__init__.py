"""RL Tango in JAX and Flax: a generator and a verifier language model, trained together with reinforcement learning.

Nothing of the package is imported here, so that `import tango_jax` starts no backend and a program can still set its
XLA flags. Start reading at `tango_jax/train.py`.
"""

import os

__version__ = "0.1.0"

# transformers is used for tokenizers and configurations, for which it needs no PyTorch; it would say so every time.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
