"""Datasets: problems, labelled solutions and SFT rows from files, hub ids and names of known datasets."""
