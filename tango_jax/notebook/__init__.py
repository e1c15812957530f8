"""What the notebooks in notebooks/ need beside the package: their setup, live curves, pictures of records.

Nothing else imports it: IPython and packaging are there where a notebook runs, and pillow comes with matplotlib.
"""
