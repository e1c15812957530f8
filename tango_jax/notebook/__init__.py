"""Support code for the notebooks in notebooks/: setup, live curves, and figures of the loop's records.

Nothing else imports this package. IPython and packaging are available wherever a notebook runs; pillow is a dependency
of matplotlib.
"""
