"""The method: a turn maps a `Turn` to a `Lesson`. tango.py holds the paper's two turns."""
