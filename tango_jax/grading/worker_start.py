"""The first file of a grading process: sets up what it imports from, then runs `worker.py`. Standard library only.

Stage of the loop: grading. `pool.py` starts it by its path as `python -I -S worker_start.py LIMIT DEADLINE PATH...`. In
that mode the interpreter imports from the standard library alone, whatever the working folder, PYTHONPATH and the
folder of the main script hold. The import path of the parent follows behind it, so that a worker finds the packages
that the parent finds, while a file `random.py` in any of these folders shadows nothing.
"""
import importlib.util
import sys
from pathlib import Path


def load_package(folder: Path) -> None:
    """Import `tango_jax` from this folder: the one that the parent runs, wherever it came from, a checkout included."""
    init = folder / "__init__.py"
    spec = importlib.util.spec_from_file_location("tango_jax", init, submodule_search_locations=[str(folder)])
    package = importlib.util.module_from_spec(spec)
    sys.modules["tango_jax"] = package
    spec.loader.exec_module(package)


if __name__ == "__main__":
    limit_s, deadline_s, *paths = sys.argv[1:]
    sys.path += paths
    load_package(Path(__file__).resolve().parents[1])
    from tango_jax.grading.worker import main

    sys.exit(main(int(limit_s), float(deadline_s)))
