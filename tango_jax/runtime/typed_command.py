"""How messages name a command of this project: as the user started this one. Nothing here imports jax."""

import os
import sys


def typed_command(command: str) -> str:
    """`tango-<command>` where a console script started this process, else `python -m tango_jax.<command>`."""
    is_script = os.path.basename((sys.argv or [""])[0]).startswith("tango-")
    return f"tango-{command}" if is_script else f"python -m tango_jax.{command}"
