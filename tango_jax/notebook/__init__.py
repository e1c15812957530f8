"""Support code for the notebooks in notebooks/: live curves, and figures of the loop's records.

Nothing else imports this package. IPython is available wherever a notebook runs; pillow is a dependency of matplotlib.
"""
