"""The torture suite: kills, flipped bytes, full disks, hostile text and mistakes, each many times, at random.

    bash launch/torture.sh                      # full size: over an hour on two CPU cores
    bash launch/torture.sh --only=kills,flips   # some of it
    bash launch/torture.sh --share=0.05         # a twentieth of everything

Prints what was tried and what survived, and everything that did not; ends with code 1 where something did not survive.
"""

import argparse
import math
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from torture import answers, faults, flips, kills, mistakes, mutations, starts, terms
from torture.outcome import Outcome

SHOWN_FAILURES = 20


class Section(NamedTuple):
    """One kind of trouble."""

    text: str  # what is done
    count: int  # how often, at full size
    run: Callable[..., Outcome]  # of a count, a seed and, if need be, a folder that is there
    needs_folder: bool


SECTIONS = {
    "kills": Section("runs killed (SIGKILL), half of them in a save, and started again", 100, kills.kills, True),
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


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("torture.sh", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS), help="names of sections, separated by commas")
    parser.add_argument("--share", type=float, default=1.0, help="of the full size of each section, above 0, at most 1")
    parser.add_argument("--seed", type=int, default=0, help="of all random choices")
    parser.add_argument("--jobs", type=int, default=2, help="sections that run at once")
    arguments = parser.parse_args(argv)
    arguments.only = arguments.only.split(",")
    unknown = sorted(set(arguments.only) - SECTIONS.keys())
    if unknown:
        parser.error(f"--only names {', '.join(unknown)}; the sections are {', '.join(SECTIONS)}")
    if not 0 < arguments.share <= 1:
        parser.error(f"--share={arguments.share} must be above 0 and at most 1")
    return arguments


def main(argv: list[str]) -> int:
    arguments = parse_arguments(argv)
    results = {}
    spawn = multiprocessing.get_context("spawn")  # a process that has started threads must not be forked
    with (
        tempfile.TemporaryDirectory(prefix="torture_") as folder,
        ProcessPoolExecutor(arguments.jobs, mp_context=spawn, max_tasks_per_child=1) as pool,
    ):
        tasks = {pool.submit(run_section, name, arguments.share, arguments.seed, Path(folder)): name
                 for name in arguments.only}  # fmt: skip
        for task in as_completed(tasks):
            name = tasks[task]
            outcome, seconds = results[name] = task.result()
            print(f"{name}: {outcome.survived} of {outcome.tried} survived, {seconds:.0f} s", flush=True)
            for failure in outcome.failures[:SHOWN_FAILURES]:
                print(f"  {failure}", flush=True)
    print(f"\nseed {arguments.seed}\n\n| | tried | survived | seconds |\n|---|---|---|---|")
    for name in arguments.only:
        outcome, seconds = results[name]
        print(f"| {SECTIONS[name].text} | {outcome.tried:,} | {outcome.survived:,} | {seconds:.0f} |")
    return int(any(outcome.survived < outcome.tried for outcome, _ in results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
