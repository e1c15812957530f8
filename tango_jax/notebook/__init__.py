"""Support code for the notebooks in notebooks/: live curves, and figures of the loop's records.
"""
