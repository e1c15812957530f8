"""From prompts to sampled token ids with their log-probabilities."""
