"""Evaluation of checkpoints: takes sets and two models; returns rows, tables and confidence intervals.

`command.py` implements `python -m tango_jax.evaluate`. The flow: `sets.py` (what is evaluated), `generator.py`
(solutions), `verifier.py` (judgements), `shards.py` (files and resuming), `voting.py` and `measures.py` (figures from
rows, with the intervals of `tracking/intervals.py`), `output.py` (the files for people), `published.py` (published
figures for comparison).

Nothing here is tuned on a test set: no threshold, weight or temperature is chosen by looking at the answers, every
selection rule and every number of samples is reported, and the greedy figure comes from a single attempt.
"""
