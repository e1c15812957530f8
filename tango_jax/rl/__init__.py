"""Equations and the jitted update: rewards, advantages and a new train state from the records of a turn.

Differences from the code published with the paper (arXiv 2505.15034); tango_jax/grading/__init__.py has those of the
parsers:
1. REINFORCE++ step rewards follow the formula. The published loop runs over the wrong axis and drops them.
2. The ends of steps come from sampled token ids. The published code tokenizes the text again.
3. The moving averages of label counts are part of the checkpoint.
4. The last-letter task is synthetic, its teacher errs, and its models are small, start at random weights, and sample
verifications at temperature 0.7.
"""
