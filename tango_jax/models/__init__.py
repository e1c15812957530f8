"""The forward pass: token ids and parameters in; hidden states, logits and a key/value cache out."""
