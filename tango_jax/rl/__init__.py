"""Equations and the jitted update: the records of a turn in; rewards, advantages and a new train state out.

The method differs from the code published with the paper (arXiv 2505.15034) as follows, and its parsers as
tango_jax/grading/__init__.py says:
1. REINFORCE++ step rewards follow the formula. The published loop runs over the wrong axis and drops them.
2. The ends of steps come from sampled token ids. The published code tokenizes the text again.
3. The moving averages of label counts are part of the checkpoint.
4. The last-letter task is synthetic, its teacher errs, and its models are small and begin at random weights. Its
   verifier samples at temperature 0.7.
"""
