"""Datasets: takes files, hub ids and names of known datasets; returns problems, labelled solutions and SFT rows."""
