"""The process and its disk: hosts, locks, signals, checkpoints and whole files, for whatever runs above."""
