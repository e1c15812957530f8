"""Evaluation of finished checkpoints: sets and two models in; rows, tables and intervals out.

`command.py` is where `python -m tango_jax.evaluate` goes on. The flow: `sets.py` (what is evaluated), `generator.py`
(solutions), `verifier.py` (judgements), `shards.py` (what is on disk, and resuming), `statistics.py` and `voting.py`
(numbers out of rows), `results.py` and `tables.py` (what people read), `published.py` (what stands beside it).

Nothing here is tuned on a test set: no threshold, weight or temperature is chosen by looking at the answers, every
selector and every number of samples is reported, and the greedy figure is of one attempt.
"""
