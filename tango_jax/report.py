"""One HTML file about one or several runs: curves side by side, the verifier's quality, speed, every dumped rollout.

    python -m tango_jax.report runs/last_letter
    python -m tango_jax.report runs/ablation --out=ablation.html
    python -m tango_jax.report runs/long --bundle=report

RUN is the workdir of a run, or a folder with several (an ablation). Runs of the same arm and settings are seeds of one
line; labels show what differs between lines. The file needs no network: open it from disk, or send it. It holds up to
20,000 rollouts and 19 MB. --bundle=DIR writes a folder without limits; open its index.html. During a run, the same
command writes the report anew; --watch=60 repeats it every 60 s until all runs are finished. Reload the page to see the
newest state, with the same rollout open.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tango_jax.cli.arguments import Parser
from tango_jax.cli.config_file import did_you_mean
from tango_jax.cli.ranges import check_options
from tango_jax.config import default_config, flatten
from tango_jax.runtime.checks import file_to_write, folder_to_write, require
from tango_jax.runtime.failures import ends_in_one_line
from tango_jax.runtime.keys import COUNT_OR_NONE, Range
from tango_jax.runtime.model_text import on_one_line
from tango_jax.tracking.known_arms import arms_of_runs, known
from tango_jax.viewer.build import MAX_ROLLOUTS, Built, build_bundle, build_page
from tango_jax.viewer.runs import find_runs

RANGES = {"rollouts": COUNT_OR_NONE, "watch": Range(0.0, 86_400.0)}  # seconds of a day
DEFAULT_OUT = "report.html"
PAGES = (".html", ".htm")


class Options(NamedTuple):
    runs: list[str]
    out: Path  # the file, or the folder of a bundle
    is_bundle: bool
    rollouts: int | None  # None: all
    watch: float  # seconds
    as_seed: tuple[str, ...]


def parse(argv: Sequence[str] | None) -> Options:
    parser = Parser("report", __doc__)
    parser.add_argument("runs", metavar="RUN", nargs="*", help="workdir of a run, or a folder that holds several")
    parser.add_argument("--out", metavar="FILE",
                        help=f".html is added to a name that does not end so; default: {DEFAULT_OUT}")
    parser.add_argument("--bundle", metavar="DIR",
                        help="write a folder instead of a file, for runs with more rollouts than one file can hold")
    parser.add_argument("--rollouts", metavar="N", type=int,
                        help=f"the most rollouts that it may hold; default: {MAX_ROLLOUTS} in a file, all in a folder")
    parser.add_argument("--as_seed", metavar="KEY[,KEY]", default="",
                        help="settings that may differ between runs of one line, as the seed does; such as "
                        "task.data_seed")
    parser.add_argument("--watch", metavar="SECONDS", type=float, default=0.0,
                        help="write the report anew every WATCH seconds, until all runs are finished; default: once")
    args = parser.parse_args(argv)
    require(bool(args.runs), "no run is named: give the --workdir of a run or of an ablation")
    require(args.out is None or args.bundle is None, f"--out={args.out} and --bundle={args.bundle}: give one of them")
    as_seed = tuple(filter(None, args.as_seed.split(",")))
    for key in as_seed:
        require(key in flatten(default_config()), f"--as_seed={args.as_seed}: unknown setting {key}{did_you_mean(key)}")
    check_options(args, {name: allowed for name, allowed in RANGES.items() if getattr(args, name) is not None})
    is_bundle = args.bundle is not None
    rollouts = args.rollouts if is_bundle or args.rollouts is not None else MAX_ROLLOUTS
    if is_bundle:
        require(not args.bundle.endswith(PAGES), f"--bundle={args.bundle} is the name of a page, and a bundle is a "
                "folder: name a folder, or write one file with --out")
        out = folder_to_write("--bundle", args.bundle)
    else:
        name = DEFAULT_OUT if args.out is None else args.out
        require(not name.endswith("/"), f"--out={name} is a folder; name a file in it, or write a folder with --bundle")
        out = file_to_write("--out", name)
        if not name.endswith(PAGES):  # which a browser would show as text
            out = file_to_write("--out", f"{name}.html")
    return Options(args.runs, out, is_bundle, rollouts, args.watch, as_seed)


def report(options: Options) -> tuple[Built, bool]:
    """Write the report; returns what was written, and whether every run is finished."""
    runs = find_runs(options.runs)
    is_finished = all(run.is_finished for run in runs)
    with known(arms_of_runs(run.workdir for run in runs)):
        if options.is_bundle:
            return build_bundle(runs, options.out, options.rollouts, options.as_seed), is_finished
        return build_page(runs, options.out, options.rollouts, as_seed=options.as_seed), is_finished


def main(argv: Sequence[str] | None = None) -> None:
    with ends_in_one_line():
        options = parse(argv)
    with ends_in_one_line(f"{_shown(options)} is as it was last written"):
        report_until_finished(options)


def report_until_finished(options: Options) -> None:
    warned: set[str] = set()
    while True:
        built, is_finished = report(options)
        for warning in dict.fromkeys(built.warnings):
            if warning not in warned:
                print(on_one_line(f"warning: {warning}"), file=sys.stderr, flush=True)
        warned |= set(built.warnings)
        print(on_one_line(f"{_shown(options)}: {_described(built, options.is_bundle)}"), flush=True)
        if is_finished or not options.watch:
            return
        time.sleep(options.watch)


def _shown(options: Options) -> Path:
    return options.out / "index.html" if options.is_bundle else options.out


def _described(built: Built, is_bundle: bool) -> str:
    left_out = built.rollouts_dumped - built.rollouts
    hint = "" if is_bundle else "; --bundle=DIR holds all"
    note = f" ({left_out} more left out{hint})" if left_out else ""
    return f"runs {built.runs}, rollouts {built.rollouts}{note}, {built.size / 1e6:.1f} MB"


if __name__ == "__main__":
    main()
