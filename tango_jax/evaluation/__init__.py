"""Evaluation of checkpoints: `settings.py` and `command.py` implement `python -m tango_jax.evaluate`.

The flow: `sets.py`, `responses.py`, `shards.py`, `voting.py` and `measures.py`, `output.py`. No threshold, weight or
temperature is chosen on a test set.
"""
