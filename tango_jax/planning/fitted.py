"""The shares of a device's rates that published measurements tell, and how far these lie from them.

In: the rows of published.csv. Out: for a target and a number of devices, the shares that times are predicted with and
those that bound them; each row predicted over measured. Stage: `plan`, before times are predicted; `plan --published`
prints the rows.

Rows marked `fitted` give the shares, one for each generation of devices and kind of work, by least squares of
logarithms: the geometric mean of the shares that the rows have reached. Updates on several hosts of GPUs reach less, by
a power of the hosts' number that is fitted with them. Rows marked `held out` are predicted. A kind of work that nobody
has measured on a device takes the share of the nearest kind there, or else the mean of the other devices of its
platform.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from tango_jax.planning.published import Row, predicted_seconds, published_rows
from tango_jax.planning.targets import TARGETS, Reached, Shares, Target
from tango_jax.runtime.console import Console
from tango_jax.runtime.failures import typed_command

# Devices of one generation reach the same shares.
_GENERATIONS = {"a100-80gb": "a100", "a100-40gb": "a100", "h100": "h100", "h200": "h100"}
# Which share a row of each kind tells; of sampling, what is left when its products are known.
TELLS = {"update": "update", "score": "score", "prefill": "prefill", "sample": "read", "decode": "read"}
_NEAREST = {"score": "update", "prefill": "score"}
FEW = 5  # with fewer rows of a kind on a device, those of other devices bound its times, too
LEAST_SHARE, MOST_SHARE = 1e-4, 4.0  # between which one is looked for
_NAMES = {"update": "updates", "score": "scores", "prefill": "prompts and products of decode steps",
          "read": "memory"}  # fmt: skip


class Fit(NamedTuple):
    """Shares by generation and name, on one host, and the power of the number of hosts by which updates lose."""

    shares: dict[tuple[str, str], float]
    decline: float

    def of(self, target: Target, hosts: int) -> Shares:
        """What the target reaches on so many hosts."""
        found = {name: self.share(target, name) for name in Shares._fields}
        if target.platform == "gpu":
            found["update"] *= hosts**-self.decline
        return Shares(**found)

    def share(self, target: Target, name: str) -> float:
        """On one host: the target's own, or the mean of the others."""
        if own := self._known(generation(target.name), name):
            return own
        others = list(self.others(target, name).values())
        return math.exp(np.mean(np.log(others))) if others else getattr(Shares(), name)

    def others(self, target: Target, name: str) -> dict[str, float]:
        """{generation: share} of the targets of the same platform; for a CPU, of all."""
        like = {generation(one.name) for one in TARGETS.values() if target.platform in ("cpu", one.platform)}
        return {one: share for one in sorted(like) if (share := self._known(one, name))}

    def is_known(self, device: str, name: str) -> bool:
        """Whether the generation has been measured, in this kind of work or in the nearest."""
        return self._known(device, name) is not None

    def _known(self, device: str, name: str) -> float | None:
        """The share of a generation, or of its nearest kind of work."""
        while (device, name) not in self.shares and name in _NEAREST:
            name = _NEAREST[name]
        return self.shares.get((device, name))

    def basis(self, target: Target, name: str) -> str:
        """Where a share comes from, in a few words; empty: from measurements of this work on this generation."""
        own = generation(target.name)
        if (own, name) in self.shares:
            return ""
        return f"as {_NAMES[_NEAREST[name]]}" if self._known(own, name) else "as other devices"


def generation(device: str) -> str:
    """What a device shares its shares with."""
    return _GENERATIONS.get(device, device)


def fit(rows: Iterable[Row]) -> Fit:
    """The shares that the fitted rows tell."""
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        if row.use == "fitted":
            by_name.setdefault(TELLS[row.kind], []).append(row)
    shares, decline = _fit_updates(by_name.pop("update"))
    for name in ("score", "prefill", "read"):  # sampling's products are known when it is asked how memory is read
        found: dict[str, list[float]] = {}
        for row in by_name.get(name, []):
            device = generation(row.device)
            known = Fit(shares, decline)
            others = {other: known._known(device, other) or 1.0 for other in Shares._fields if other != name}
            found.setdefault(device, []).append(math.log(reached_share(row, Shares(**others), name)))
        shares = shares | {(device, name): math.exp(np.mean(logs)) for device, logs in found.items()}
    return Fit(shares, decline)


def _fit_updates(rows: list[Row]) -> tuple[dict[tuple[str, str], float], float]:
    """log share = that of the generation - decline x log(hosts) on GPUs, by least squares."""
    devices = sorted({generation(row.device) for row in rows})
    inputs = np.array([[*(generation(row.device) == device for device in devices),
                        -math.log(row.hosts) if row.target.platform == "gpu" else 0.0] for row in rows])  # fmt: skip
    logs = np.log([reached_share(row, Shares(), "update") for row in rows])
    *found, decline = np.linalg.lstsq(inputs, logs, rcond=None)[0]
    return {(device, "update"): math.exp(log) for device, log in zip(devices, found, strict=True)}, float(decline)


def reached_share(row: Row, shares: Shares, name: str) -> float:
    """The share of that name with which the row would be predicted exactly; the others are given."""
    return solved(lambda share: predicted_seconds(row, shares._replace(**{name: share})), row.seconds)


def solved(seconds_fn: Callable[[float], float], seconds: float) -> float:
    """The share at which `seconds_fn`, which falls with it, gives these seconds; at most MOST_SHARE and at least
    LEAST_SHARE."""
    low, high = math.log(LEAST_SHARE), math.log(MOST_SHARE)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds_fn(math.exp(middle)) > seconds else (low, middle)
    return math.exp((low + high) / 2)


@functools.cache
def published_fit() -> Fit:
    """That of published.csv."""
    return fit(published_rows())


def ratio(row: Row, found: Fit) -> float:
    """Predicted over measured."""
    return predicted_seconds(row, found.of(row.target, row.hosts)) / row.seconds


def reached(target: Target, devices: int) -> Reached:
    """The shares of a target with so many devices, and those that bound them."""
    found = published_fit()
    likely = found.of(target, max(1, devices // target.per_host))
    ends = {name: _ends(found, target, name) for name in Shares._fields}
    slow = Shares(*(getattr(likely, name) * low for name, (low, _) in ends.items()))
    quick = Shares(*(min(1.0, getattr(likely, name) * high) for name, (_, high) in ends.items()))
    lines = [f"{_NAMES[name]} {getattr(likely, name):.0%} ({getattr(slow, name):.0%} to {getattr(quick, name):.0%}"
             + (f"; {basis}" if (basis := found.basis(target, name)) else "") + ")" for name in Shares._fields]
    return Reached(likely, quick, slow, tuple(lines))


def _ends(found: Fit, target: Target, name: str) -> tuple[float, float]:
    """By what a share must be multiplied to predict the slowest and the quickest of the rows that bear on it: those of
    this work on this generation; with fewer than FEW of them also those of the nearest work on it, then of this work on
    other devices of its platform, then on all. A share that is another work's is as uncertain as that one, at least."""
    own, like, quotients = generation(target.name), found.others(target, name), []
    if found.basis(target, name) and name in _NEAREST:
        quotients.extend(_ends(found, target, _NEAREST[name]))
    # Where nothing is known, others count as if they had been given the share that this device is given.
    share = None if found.is_known(own, name) else found.share(target, name)
    rest = {generation(device) for device in TARGETS} - {own}
    for devices, kind in (({own}, name), ({own}, _NEAREST.get(name)), (rest & {*like}, name), (rest - {*like}, name)):
        if len(quotients) >= FEW:
            break
        for row in published_rows():
            device = generation(row.device)
            if TELLS.get(row.kind) == kind is not None and device in devices:
                quotients.append(ratio(row, found) * (like[device] / share if share and device in like else 1.0))
    return float(min(1.0, *quotients)), float(max(1.0, *quotients))


def published_as_json() -> dict:
    """Every row with what is predicted for it, in its own unit; and the shares."""
    found = published_fit()
    return {
        "rows": [row._asdict() | {"predicted": row.in_unit(predicted_seconds(row, found.of(row.target, row.hosts))),
                                  "seconds_predicted_over_measured": ratio(row, found)} for row in published_rows()],
        "shares_on_one_host": [{"device": device, "kind": name, "share": share}
                               for (device, name), share in found.shares.items()],
        "updates_decline_by_hosts_to_the_power_of": found.decline,
    }  # fmt: skip


def show_published(console: Console) -> None:
    """Print every row beside what is predicted for it, and the shares, as in planning/README.md."""
    found = published_fit()
    console.table("Published measurements, and what is predicted for them; seconds predicted over measured last",
                  ("kind", "of", "on", "model", "measured", "predicted", "ratio", ""), table_rows())
    names = {name: ", ".join(f"{device} {share:.0%}" for (device, one), share in found.shares.items() if one == name)
             for name in Shares._fields}  # fmt: skip
    for name, told in names.items():
        console.log(f"share of {_NAMES[name]} on one host: {told}")
    console.log(f"updates on GPUs reach hosts^-{found.decline:.3f} of that on several hosts")
    held = [ratio(row, found) for row in published_rows() if row.use != "fitted"]
    near = sum(1 / 1.25 <= one <= 1.25 for one in held)
    console.log(f"{near} of {len(held)} rows held out are within 25 %; {typed_command('plan')} --published --json has "
                "settings and sources")


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def table_rows() -> list[tuple]:
    """The rows as people read them."""
    found, rows = published_fit(), []
    for row in published_rows():
        quotient = ratio(row, found)
        rows.append((row.kind, row.what, f"{row.devices} {row.device}", row.model, f"{row.measured:,g} {row.unit}",
                     _digits(row.in_unit(row.seconds * quotient)), f"{quotient:.2f}", row.use))
    return rows
