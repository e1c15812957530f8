"""Process and file-system support for all layers above: hosts, locks, signals, checkpoints and atomic file writes."""
