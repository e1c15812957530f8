"""Prompts and tokenizers: text to token ids, and ids to text with the span of each token."""
