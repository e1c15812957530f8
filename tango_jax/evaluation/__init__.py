"""Evaluation of checkpoints: takes sets and two models; returns rows, tables and confidence intervals.

`command.py` implements `python -m tango_jax.evaluate`. The flow: `sets.py` (what is evaluated), `generator.py`
(solutions), `verifier.py` (judgements), `shards.py` (files and resuming), `statistics.py` and `voting.py` (metrics from
rows), `results.py` and `tables.py` (reports for people), `published.py` (published figures for comparison).

Nothing here is tuned on a test set: no threshold, weight or temperature is chosen by looking at the answers, every
selection rule and every number of samples is reported, and the greedy figure comes from a single attempt.
"""
