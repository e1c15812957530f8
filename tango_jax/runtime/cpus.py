"""How many CPU cores there are for this process."""

import os


def num_cpus() -> int:
    """The cores that this process may use: containers, launchers and cluster jobs rarely give it the whole machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
