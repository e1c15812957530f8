"""Tasks: problems by index and, where available, gold step labels and text to imitate."""
