"""The decoder, its attention and cache, and the presets of published architectures."""
