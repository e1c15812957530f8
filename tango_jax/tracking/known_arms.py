"""Records of the arms that runs are drawn and compared by: built in, or stored by runs (`arms_of_runs`)."""

import contextlib
import contextvars
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tango_jax.method.arms import ARMS, Arm
from tango_jax.method.own_arm import read_arm
from tango_jax.tracking.provenance import read_provenance

_own = contextvars.ContextVar("_own", default=None)  # {name: record}


@contextlib.contextmanager
def known(arms: Mapping[str, Arm]) -> Iterator[None]:
    token = _own.set((_own.get() or {}) | dict(arms))
    try:
        yield
    finally:
        _own.reset(token)


def record_of(name: str) -> Arm | None:
    return ARMS.get(name) or (_own.get() or {}).get(name)


def known_names() -> list[str]:
    return [*ARMS, *(name for name in _own.get() or {} if name not in ARMS)]


def arms_of_runs(workdirs: Iterable[Path]) -> dict[str, Arm]:
    """{name: record} of the arms in these workdirs that are not built in. Raises ValueError for a damaged record."""
    stored = [read_provenance(workdir).get("arm") for workdir in workdirs]
    return {record["name"]: read_arm(record) for record in stored if record and record["name"] not in ARMS}
