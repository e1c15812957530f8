"""Arms over seeds from the same stage-1 checkpoints (the paper's figure 4), and grids of such experiments.

    python -m tango_jax.ablate --config=last_letter --workdir=runs/ablation
    python -m tango_jax.ablate --config=last_letter --workdir=runs/map --config.ablation.workers=2 \\
        --config.ablation.grid='{"task.rl_words": [(2, 4), (2, 6)], "task.data_seed": [3, 4, 5]}'

Writes a run (see tango_jax.train) in DIR/<arm>/seed_<n>/, or with a grid in DIR/<cell>/<arm>/seed_<n>/, then every
evaluation of every finished run in DIR/ablation.csv, a summary in DIR/ablation.md, which names the runs that are not
finished, and DIR/figures. The same command resumes.
Arms, seeds and cells can be added to a finished experiment: see --keys=ablation. The table keeps the runs of other
commands, such as other parts of the experiment. Remove ablation.csv to have this command's runs alone.

    python -m tango_jax.ablate --figures=runs/map/ablation.csv --out=figures [--against=grpo]

draws figures from tables, and prints and writes a summary. --against compares all arms of all settings with one, ARM or
ARM:SETTING, in pairs, also over equal tokens.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from tango_jax.ablation.against import compare
from tango_jax.ablation.experiment import TABLE, run_experiment
from tango_jax.ablation.figures import draw_figures, learning, left_out
from tango_jax.ablation.planned_runs import Plan, make_plan
from tango_jax.ablation.summary import summarize
from tango_jax.cli.arguments import Parser
from tango_jax.cli.command_line import parse_command_line
from tango_jax.cli.session import session
from tango_jax.runtime import hosts
from tango_jax.runtime.atomic import write_atomically
from tango_jax.runtime.checks import folder_to_write
from tango_jax.runtime.failures import ends_in_one_line
from tango_jax.runtime.lock import locked
from tango_jax.tracking.evaluations import Evaluation, own_arms, read_tables
from tango_jax.tracking.known_arms import known
from tango_jax.tracking.plots import save_figure


def write_results(plan: Plan, rows: Sequence[Evaluation]) -> list[Path]:
    """Summary and figures. Raises ValueError for runs that do not compare, say after a file of problems was edited."""
    files = [plan.workdir / TABLE, plan.workdir / "ablation.md"]
    read_tables(files[:1])
    with known(own_arms(rows)):
        missing = [run.name for run in plan.runs if not run.is_finished()]
        left_out = f"\nNot finished, and left out: {', '.join(missing)}.\n" * bool(missing)
        write_atomically(files[-1], summarize(rows) + left_out)
        return files + draw_figures(rows, plan.workdir / "figures")


def redraw(argv: Sequence[str]) -> None:
    parser = Parser("ablate", __doc__)
    parser.add_argument("--figures", metavar="FILE", nargs="+", required=True, help="tables of experiments")
    parser.add_argument("--out", metavar="DIR", default="figures", help="default: %(default)s")
    parser.add_argument("--against", metavar="ARM[:SETTING]", default="", help="compare all arms of all settings with "
                        "it")
    options = parser.parse_args(argv)
    folder = folder_to_write("--out", options.out)
    rows = read_tables(options.figures)
    with known(own_arms(rows)):
        if options.against:
            table, figure = compare(learning(rows), options.against, left_out(rows))
        files, summary = draw_figures(rows, folder), summarize(rows)
    if options.against:
        files, summary = [*files, folder / "against.png"], f"{summary}\n{table}"
        save_figure(figure, files[-1])
    write_atomically(folder / "summary.md", summary)
    print(summary, *(f"  {path}" for path in [*files, folder / "summary.md"]), sep="\n")


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if any(argument.split("=")[0] == "--figures" for argument in argv):
        with ends_in_one_line():
            redraw(argv)
        return
    config, workdir = parse_command_line("ablate", __doc__, argv, "runs/ablation")
    with session(config, workdir) as console:
        plan = make_plan(config, workdir)
        with locked(workdir, console):
            outcome = run_experiment(plan, console)
            if hosts.is_first() and outcome.rows:
                files = write_results(plan, outcome.rows)
                console.log((workdir / "ablation.md").read_text())
                console.log("\n".join(f"  {path}" for path in files))
        if outcome.failed:
            lines = "; ".join(f"{name}: {line}" for name, line in outcome.failed.items())
            raise ValueError(f"{len(outcome.failed)} of {len(plan.runs)} runs failed ({lines}): the same command tries "
                             "them again, and goes on with what they saved")


if __name__ == "__main__":
    main()
