"""Equations and the jitted update: the records of a turn in; rewards, advantages and a new train state out."""
