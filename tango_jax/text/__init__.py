"""Words and token ids: prompts and tokenizers; text in, ids out, and back with the span of each token."""
