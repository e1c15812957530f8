"""One HTML file about one or several runs: curves, arms, the verifier's quality, speed, and every dumped rollout.

    python -m tango_jax.report runs/last_letter
    python -m tango_jax.report runs/ablation --out=ablation.html

RUN is the workdir of a run, or a folder that holds several (an ablation). The file needs no network: open it from disk,
or send it. While a run goes on, the same command writes the file anew; --watch=60 repeats it every 60 s until all runs
are finished, and the browser's reload shows the newest state, with the same rollout open.

usage: RUN [RUN ...] [--out=report.html] [--rollouts=20000] [--watch=SECONDS]
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tango_jax.cli.ranges import COUNT_OR_NONE, Range
from tango_jax.runtime import failures
from tango_jax.runtime.checks import file_to_write, shortened
from tango_jax.runtime.model_text import on_one_line
from tango_jax.viewer.build import MAX_ROLLOUTS, Built, build_page
from tango_jax.viewer.runs import find_runs

RANGES = {"rollouts": COUNT_OR_NONE, "watch": Range(0.0, 86_400.0)}  # seconds of a day


def parse(argv: list[str]) -> tuple[list[str], Path, int, float]:
    """(runs, out, rollouts, watch) of a command line.

    Raises:
        ValueError: no run, an unknown option, or a number that is none.
    """
    options = {"out": "report.html", "rollouts": str(MAX_ROLLOUTS), "watch": "0"}
    folders = [argument for argument in argv if not argument.startswith("-")]
    for argument in argv:
        name, _, value = argument.removeprefix("--").partition("=")
        if argument.startswith("-"):
            if name not in options or not value:
                raise ValueError(f"unknown option {argument!r}; --help shows the usage")
            options[name] = value
    if not folders:
        raise ValueError("no run is named: give the --workdir of a run or of an ablation")
    try:
        rollouts, watch = int(options["rollouts"]), float(options["watch"])
    except ValueError as error:
        raise ValueError(f"--rollouts is a whole number and --watch one of seconds: {error}") from error
    for name, value in (("rollouts", rollouts), ("watch", watch)):
        RANGES[name].check(f"--{name}={shortened(value)}", value)
    return folders, file_to_write("--out", options["out"]), rollouts, watch


def report(folders: list[str], out: Path, rollouts: int) -> tuple[Built, bool]:
    """Write the page; returns what it holds, and whether every run is finished."""
    runs = find_runs(folders)
    return build_page(runs, out, rollouts), all(run.is_finished for run in runs)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command with these arguments, by default those of the process."""
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        print(__doc__.strip())
        return
    try:
        folders, out, rollouts, watch = parse(argv)
        while True:
            built, is_finished = report(folders, out, rollouts)
            left_out = built.rollouts_dumped - built.rollouts
            note = f" ({left_out} more left out)" if left_out else ""
            built_of = f"runs {built.runs}, rollouts {built.rollouts}{note}, {built.size / 1e6:.1f} MB"
            print(on_one_line(f"{out}: {built_of}"), flush=True)
            if is_finished or not watch:
                return
            time.sleep(watch)
    except failures.EXPECTED as error:
        sys.exit(failures.last_line(error))
    except KeyboardInterrupt:
        sys.exit(f"interrupted; {out} is as it was last written")


if __name__ == "__main__":
    main()
