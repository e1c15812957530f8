"""The training loop: takes a configuration and produces two trained policies. Read run.py, turn.py, rollouts.py."""
