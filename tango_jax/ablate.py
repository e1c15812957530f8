"""The experiment of the paper's figure 4: every arm over several seeds, all from the same stage-1 checkpoints.

    python -m tango_jax.ablate --config=last_letter --workdir=runs/ablation

Writes DIR/<arm>/seed_<n>/ (one run each, see tango_jax.train), DIR/ablation.md, DIR/ablation.csv and DIR/ablation.png.
If interrupted, the same command resumes. Arms and seeds are set by `ablation.arms` and `ablation.seeds`; every seed is
reported, and arms and seeds can be added to a finished experiment.
"""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from tango_jax.cli.command_line import parse_command_line
from tango_jax.cli.session import session
from tango_jax.cli.validation import validate
from tango_jax.config import ROLES
from tango_jax.loop.init_from import check_init_from
from tango_jax.loop.run import train
from tango_jax.loop.stage_one import run_stage_one
from tango_jax.loop.try_rewards import load_and_try_rewards
from tango_jax.rl.policy import make_policies
from tango_jax.runtime import hosts
from tango_jax.runtime.atomic import write_atomically
from tango_jax.runtime.console import Console
from tango_jax.runtime.lock import hold
from tango_jax.tasks.registry import make_task
from tango_jax.tracking.metrics import read_metrics
from tango_jax.tracking.plots import plot_ablation
from tango_jax.tracking.results import has_results
from tango_jax.tracking.run_config import check_config, save_config

COLUMNS = {  # column title -> name in the evaluation rows
    "generator accuracy": "generator/accuracy",
    "verifier step F1": "verifier/pool/step_f1",
    "verifier outcome F1": "verifier/pool/outcome_f1",
}


def run_config(config: ConfigDict, workdir: Path, arm: str, seed: int) -> ConfigDict:
    """The settings of one run: those of the experiment, with its arm, its seed and the shared stage 1."""
    run = config.copy_and_resolve_references()
    run.arm, run.seed = arm, seed
    for role in ROLES:
        if config[role].sft.steps and not config[role].init_from:
            run[role].init_from = str(workdir)
    return run


def ablate(config: ConfigDict, workdir: Path, console: Console) -> dict:
    """Run what is missing, then write tables and figure. Returns {arm: {seed: evaluation rows}}."""
    check_config(config, workdir / "config.json", may_change=("ablation.",))
    preemption = hosts.Preemption()
    check_init_from(config)
    policies = make_policies(config)
    task = make_task(config, {role: policy.tokenizer for role, policy in policies.items()})
    load_and_try_rewards(config, task)
    run_stage_one(policies, config, task, workdir, console, preemption)
    # Seeds in the outer loop: an interrupted experiment then has complete comparisons for its first seeds.
    plan = [(arm, int(seed)) for seed in config.ablation.seeds for arm in config.ablation.arms]
    runs = {arm: {} for arm in config.ablation.arms}
    for number, (arm, seed) in enumerate(plan, 1):
        directory = workdir / arm / f"seed_{seed}"
        if not hosts.from_first(has_results(directory)):
            console.log(f"run {number} of {len(plan)}: {arm}, seed {seed}")
            train(run_config(config, workdir, arm, seed), directory, console, policies, preemption)
        save_config(config, workdir / "config.json", may_change=("ablation.",))  # after stage 1 or the first run
        runs[arm][seed] = [row for row in read_metrics(directory / "metrics.jsonl") if row["phase"] == "eval"]
    if hosts.is_first():
        write_tables(runs, workdir)
        plot_ablation(runs, workdir / "ablation.png")
    return runs


def write_tables(runs: dict, workdir: Path) -> None:
    """Write ablation.md (mean over seeds, and the value of every seed) and ablation.csv (every evaluation)."""
    seeds = sorted({seed for by_seed in runs.values() for seed in by_seed})
    first = next(iter(next(iter(runs.values())).values()))[0]
    # A task without a fixed pool has no verifier scores.
    columns = {title: name for title, name in COLUMNS.items() if name in first}
    lines = [
        f"Mean over seeds {', '.join(map(str, seeds))}, each seed in brackets; greedy, verifier on the fixed pool.",
        "",
        "| arm | generator accuracy, mean over training | " + " | ".join(f"{title}, end" for title in columns) + " |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for arm, by_seed in runs.items():
        cells = [_cell([mean_over_training(rows) for rows in by_seed.values()])]
        cells += [_cell([rows[-1][name] for rows in by_seed.values()]) for name in columns.values()]
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    start = ", ".join(f"{title} {first[name]:.3f}" for title, name in columns.items())
    lines += ["", f"All arms start from the same checkpoints: {start}."]
    write_atomically(workdir / "ablation.md", "\n".join(lines) + "\n")
    table = io.StringIO(newline="")
    writer = csv.writer(table)
    writer.writerow(["arm", "seed", "generator_step", *columns.values()])
    for arm, by_seed in runs.items():
        for seed, rows in by_seed.items():
            writer.writerows([arm, seed, row["generator_step"], *(row[n] for n in columns.values())] for row in rows)
    write_atomically(workdir / "ablation.csv", table.getvalue())


def mean_over_training(rows: list[dict]) -> float:
    """Mean accuracy over the evaluations after generator steps: how fast an arm learns, even if all end near the top.

    One value per generator step is used: there is also an evaluation after the warm-up and one after the last verifier
    turn.
    """
    by_step = {row["generator_step"]: row["generator/accuracy"] for row in rows}
    return float(np.mean([value for step, value in by_step.items() if step > 0] or list(by_step.values())))


def _cell(values: list[float]) -> str:
    return f"{np.mean(values):.3f} ({', '.join(f'{value:.2f}' for value in values)})"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command with these arguments, by default those of the process."""
    config, workdir = parse_command_line("ablate", __doc__, argv, "runs/ablation")
    with session(config, workdir) as console, hold(workdir, console):
        for arm in config.ablation.arms:
            validate(run_config(config, workdir, arm, 0))
        ablate(config, workdir, console)
        console.log((workdir / "ablation.md").read_text())
        for name in ("ablation.md", "ablation.csv", "ablation.png"):
            console.log(f"  {workdir / name}")


if __name__ == "__main__":
    main()
