"""Evaluation of checkpoints: `command.py` implements `python -m tango_jax.evaluate`.

The flow: `sets.py` (what is evaluated), `responses.py` (solutions and judgements), `shards.py` (files and resuming),
`voting.py` and `measures.py` (figures from rows), `output.py` (the files for people), `published.py`. Nothing is tuned
on a test set: no threshold, weight or temperature is chosen by looking at the answers.
"""
