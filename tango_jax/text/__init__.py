"""Prompts and tokenizers: convert text to token ids, and ids back to text with the span of each token."""
