"""The method: a turn is a function of a `Turn` to a `Lesson`. tango.py has those of the paper."""
