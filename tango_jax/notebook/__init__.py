"""For notebooks/: live curves, and figures of the loop's records."""
