"""Experiments of many runs: the cells of a grid, parallel runs, one table, statistics and figures."""
