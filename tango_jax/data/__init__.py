"""Rows on disk: files, hub ids and names of known sets in; problems, labelled solutions and imitation rows out."""
