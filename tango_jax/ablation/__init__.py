"""Experiments of many runs: the cells of a grid, several runs at a time, one table of all, statistics and figures."""
