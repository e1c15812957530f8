"""The kinds of trouble that there are, and how often each is made at full size."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from torture import alone, answers, faults, flips, kills, mistakes, mutations, starts, terms
from torture.outcome import Outcome


class Section(NamedTuple):
    """One kind of trouble."""

    text: str  # what is done
    count: int  # how often, at full size
    run: Callable[..., Outcome]  # of a count, a seed and, if need be, a folder that is there
    needs_folder: bool


SECTIONS = {
    "kills": Section("runs killed (SIGKILL), half of them in a save, and started again", 100, kills.kills, True),
    "alone": Section("runs with a stage 1 of own samples, killed likewise", 50, alone.kills_alone, True),
    "terms": Section("runs stopped by SIGTERM, from the first import to the end", 50, terms.terms, True),
    "starts": Section("two starts in one workdir", 10, starts.two_starts, True),
    "faults": Section("full disks, and files that vanish in mid-run", 40, faults.disk_faults, True),
    "flips": Section("a flipped byte in the newest checkpoint", 1000, flips.flips, True),
    "mutations": Section("mutated outputs through parsers and spans", 1_000_000, mutations.mutated_outputs, False),
    "answers": Section("hostile answers through the grader", 300, answers.hostile_answers, False),
    "mistakes": Section("mistakes of a user, over all commands", 145, mistakes.mistakes, False),
}


def run_section(name: str, share: float, seed: int, folder: Path) -> tuple[Outcome, float]:
    """What came of a section, and the seconds that it took."""
    section = SECTIONS[name]
    began = time.monotonic()
    arguments = {"count": math.ceil(section.count * share), "seed": seed}
    if section.needs_folder:
        (folder / name).mkdir()
        arguments["folder"] = folder / name
    return section.run(**arguments), time.monotonic() - began
