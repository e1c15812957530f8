"""What a search found, as tables for people and as JSON for programs.

In: the record of a search. Out: the overrides of the best settings and their plan, and everything that was tried with
its time and memory. Stage: the end of `plan --search`.
"""

import shlex

from tango_jax.config import ROLES
from tango_jax.planning import choices
from tango_jax.planning.choices import Settings
from tango_jax.planning.plan_tables import as_json, show
from tango_jax.planning.pricing import Candidate, Part, overrides
from tango_jax.planning.search import Search
from tango_jax.planning.targets import GIB
from tango_jax.runtime.console import Console

SHOWN_PARTS = 12  # of each role, in the tables


def search_as_json(found: Search) -> dict:
    """Plain numbers: hours of a run, GiB of a device."""
    best = found.best
    return {
        "found": best is not None,
        "overrides": _overrides(found, best) if best else [],
        "plan": as_json((best or found.given).plan),
        "given": _figures(found, found.given),
        "compiled": [_figures(found, item) for item in found.compiled],
        "estimated": [_figures(found, item) for item in found.estimated],
        "tried": [
            {"role": part.role, "part": part.kind, "settings": part.settings, "hours": part.seconds / 3600,
             "gib_beside_what_is_resident": needs / GIB}
            for part, needs in found.parts
        ],
        "refused": [{"settings": settings, "reason": reason} for settings, reason in found.refused],
    }  # fmt: skip


def _overrides(found: Search, item: Candidate) -> list[str]:
    return overrides(found.options.config, item.settings)


def _figures(found: Search, item: Candidate) -> dict:
    return {
        "overrides": _overrides(found, item),
        "hours": item.seconds / 3600,
        "gib": None if _has_error(item) else item.peak / GIB,
        "fits": item.plan.fits,
    }


def _has_error(item: Candidate) -> bool:
    return any(phase.error for phase in item.plan.phases)


def show_search(found: Search, console: Console) -> None:
    """Everything, as tables; the answer at the end."""
    memory = found.options.target.memory / GIB
    for role in ROLES:
        for kind in ("sampling", "training"):
            _show_parts([item for item in found.parts if (item[0].role, item[0].kind) == (role, kind)], console)
    if found.refused:
        _show_refused(found, console)
    rows = [_row(found, item, f"estimated, {_fits(item)}") for item in found.estimated]
    rows += [_row(found, item, f"compiled, {_fits(item)}") for item in (found.given, *found.compiled)]
    title = f"Whole settings: hours of a run, and GiB of each device, of {memory:.1f} that a program may use"
    console.table(title, ("settings", "hours", "GiB", ""), rows)
    best = found.best
    if best is None:
        console.log("nothing that was compiled fits; the configuration as it is:")
        show(found.given.plan, console)
        return
    show(best.plan, console)
    changes = _overrides(found, best)
    if not changes:
        console.log(f"nothing quicker was found than the configuration as it is: {best.seconds / 3600:.1f} h")
        return
    console.log(f"{best.seconds / 3600:.1f} h, {best.peak / GIB:.1f} of {memory:.1f} GiB, instead of "
                f"{found.given.seconds / 3600:.1f} h of the configuration as it is ({_fits(found.given)}), with:")
    for change in changes:
        console.log(f"    {shlex.quote(change)}")


def _fits(item: Candidate) -> str:
    return "fits" if item.plan.fits else "does not fit"


def _row(found: Search, item: Candidate, how: str) -> tuple:
    changes = " ".join(change.removeprefix("--config.") for change in _overrides(found, item))
    gib = "-" if _has_error(item) else item.peak / GIB
    return changes or "the configuration as it is", item.seconds / 3600, gib, how


def _show_parts(parts: list[tuple[Part, float]], console: Console) -> None:
    """The quickest ones; JSON has all."""
    role, kind = parts[0][0].role, parts[0][0].kind
    keys = choices.SAMPLING_KEYS if kind == "sampling" else (*choices.MESH_KEYS, *choices.MICRO_BATCH_KEYS)
    rows = [(*(_value(part.settings[key]) for key in keys), part.seconds / 3600, needs / GIB)
            for part, needs in parts[:SHOWN_PARTS]]
    rest = len(parts) - len(rows)
    console.table(f"{kind.capitalize()} of the {role}: hours of a run, and GiB of a device beside what is resident; "
                  f"{len(rows)} quickest" + (f", {rest} others in --json" if rest else ""),
                  (*(key.split(".")[-1] for key in keys), "hours", "GiB"), rows)


def _show_refused(found: Search, console: Console) -> None:
    """The first of each reason."""
    by_reason = {}
    for settings, reason in found.refused:
        by_reason.setdefault(reason, []).append(settings)
    rows = [("; ".join(f"{role} {_words(values)}" for role, values in first.items()), 1 + len(others), reason)
            for reason, (first, *others) in by_reason.items()]
    console.table("Refused", ("the first such settings", "of", "reason"), rows)


def _words(settings: Settings) -> str:
    return " ".join(f"{key}={_value(value)}" for key, value in settings.items())


def _value(value: object) -> object:
    return str(value).replace(" ", "") if isinstance(value, tuple | bool) else value
