"""The torture suite: kills, flipped bytes, full disks, hostile text and mistakes, each many times, at random.

    bash launch/torture.sh                      # full size: over an hour on two CPU cores
    bash launch/torture.sh --only=kills,flips   # some of it
    bash launch/torture.sh --share=0.05         # a twentieth of everything

Prints what was tried and what survived, and everything that did not; ends with code 1 where something did not survive.
"""

import argparse
import multiprocessing
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from torture.sections import SECTIONS, run_section

SHOWN_FAILURES = 20


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
                 for name in arguments.only}
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
