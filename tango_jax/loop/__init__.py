"""One run, turn by turn: a configuration in; two trained policies out. Read run.py, turn.py, rollouts.py."""
