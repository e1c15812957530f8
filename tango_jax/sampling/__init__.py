"""Sampling: prompts as token ids in; sampled token ids with their log-probabilities out."""
