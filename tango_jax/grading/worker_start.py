"""Entry script of a grading process: sets the import path, then runs `worker.py`. Standard library only.

`python -I -S worker_start.py LIMIT DEADLINE PATH...`: the standard library comes before the parent's import path, so
that a file such as `random.py` in a folder shadows nothing.
"""
import importlib.util
import sys
from pathlib import Path


def load_package(folder: Path) -> None:
    """The worker runs the parent's copy, even if that is a checkout."""
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
