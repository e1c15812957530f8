"""The method: a turn is a function of a `Turn` to a `Lesson`. tango.py holds the paper's two turns."""
