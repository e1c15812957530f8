"""Import and export of checkpoints: a folder, hub id, .gguf file or workdir becomes parameters and a tokenizer."""
