"""Checkpoints in and out: a folder, hub id, .gguf file or workdir by its name in; parameters and a tokenizer out."""
