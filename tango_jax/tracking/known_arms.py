"""The arms that runs are drawn and compared by: the built-in ones, and those that runs have stored.

A command looks up the stored records once (`arms_of_runs`, `arms_beside`) and makes them `known` while it works. An arm
without a record is drawn under its name.
"""

import contextlib
import contextvars
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tango_jax.method.arms import ARMS, Arm
from tango_jax.method.own_arm import arm_name, read_arm, stored_arm
from tango_jax.runtime.atomic import write_json_atomic
from tango_jax.tracking.provenance import read_provenance

FILE = "arms.json"  # beside a table: the records of its arms that are not built in
_own = contextvars.ContextVar("_own", default=None)  # {name: record}


@contextlib.contextmanager
def known(arms: Mapping[str, Arm]) -> Iterator[None]:
    """Make these arms known within the block."""
    token = _own.set((_own.get() or {}) | dict(arms))
    try:
        yield
    finally:
        _own.reset(token)


def record_of(name: str) -> Arm | None:
    return ARMS.get(name) or (_own.get() or {}).get(name)


def known_names() -> list[str]:
    """The names of all known arms, the built-in ones first."""
    return [*ARMS, *(name for name in _own.get() or {} if name not in ARMS)]


def arms_of_runs(workdirs: Iterable[Path]) -> dict[str, Arm]:
    """{name: record} of the arms in these workdirs that are not built in. Raises ValueError for a damaged record."""
    stored = [read_provenance(workdir).get("arm") for workdir in workdirs]
    return {record["name"]: read_arm(record) for record in stored if record and record["name"] not in ARMS}


def keep_arms(arms: Iterable[str], folder: Path) -> None:
    """Write the records of the arms that are not built in beside a table."""
    records = {arm_name(arm): stored_arm(arm) for arm in arms if arm not in ARMS}
    if records:
        write_json_atomic(folder / FILE, records)


def arms_beside(tables: Iterable[str | Path]) -> dict[str, Arm]:
    """{name: record} of the arms whose records lie beside the tables. Raises ValueError for a damaged file."""
    found = {}
    for path in dict.fromkeys(Path(table).parent / FILE for table in tables):
        if path.is_file():
            try:
                found |= {name: read_arm(record) for name, record in json.loads(path.read_text("utf-8")).items()}
            except (OSError, ValueError, AttributeError) as error:
                raise ValueError(f"{path} cannot be read ({error}): restore it, or delete it to draw its arms under "
                                 "their names") from error
    return found
