"""The training loop: two trained policies from a configuration. Read run.py, then turn.py."""
