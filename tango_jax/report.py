"""One HTML file about one or several runs: curves, arms, the verifier's quality, speed, and every dumped rollout.

    python -m tango_jax.report runs/last_letter
    python -m tango_jax.report runs/ablation --out=ablation.html

RUN is the workdir of a run, or a folder that holds several (an ablation). The file needs no network: open it from disk,
or send it. While a run goes on, the same command writes the file anew; --watch=60 repeats it every 60 s until all runs
are finished, and the browser's reload shows the newest state, with the same rollout open.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tango_jax.cli.arguments import Parser
from tango_jax.cli.ranges import COUNT_OR_NONE, Range, check_options
from tango_jax.runtime import failures
from tango_jax.runtime.checks import file_to_write
from tango_jax.runtime.model_text import on_one_line
from tango_jax.viewer.build import MAX_ROLLOUTS, Built, build_page
from tango_jax.viewer.runs import find_runs

RANGES = {"rollouts": COUNT_OR_NONE, "watch": Range(0.0, 86_400.0)}  # seconds of a day


def parse(argv: Sequence[str] | None) -> tuple[list[str], Path, int, float]:
    """(runs, out, rollouts, watch) of a command line.

    Raises:
        ValueError: no run, an unknown option, or a value that cannot be.
    """
    parser = Parser("report", __doc__)
    parser.add_argument("runs", metavar="RUN", nargs="*", help="workdir of a run, or a folder that holds several")
    parser.add_argument("--out", metavar="FILE", default="report.html", help="default: %(default)s")
    parser.add_argument("--rollouts", metavar="N", type=int, default=MAX_ROLLOUTS,
                        help="the most rollouts that the file may hold; default: %(default)s")
    parser.add_argument("--watch", metavar="SECONDS", type=float, default=0.0,
                        help="write the file anew after so many seconds, until all runs are finished; default: once")
    args = parser.parse_args(argv)
    if not args.runs:
        raise ValueError("no run is named: give the --workdir of a run or of an ablation")
    check_options(args, RANGES)
    return args.runs, file_to_write("--out", args.out), args.rollouts, args.watch


def report(folders: list[str], out: Path, rollouts: int) -> tuple[Built, bool]:
    """Write the page; returns what it holds, and whether every run is finished."""
    runs = find_runs(folders)
    return build_page(runs, out, rollouts), all(run.is_finished for run in runs)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command with these arguments, by default those of the process."""
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
