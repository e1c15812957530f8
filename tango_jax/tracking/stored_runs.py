"""A finished run compared with stored runs of other arms: when each reached LEVEL, and at which cost.

Only runs of the same task, start (`task.data_seed`) and seed are compared.
"""

from pathlib import Path

from ml_collections import ConfigDict

from tango_jax.method.own_arm import arm_name, arm_of
from tango_jax.runtime.failures import describe
from tango_jax.runtime.model_text import on_one_line
from tango_jax.tracking.evaluations import (
    OTHER_PROBLEMS,
    SETUP_IN_WORDS,
    evaluations_of,
    own_arms,
    read_tables,
    sources_of,
    task_name,
)
from tango_jax.tracking.known_arms import known
from tango_jax.tracking.learning_curve import (
    LEVEL,
    Curve,
    curves_by_setting,
    differing,
    flops_to,
    has_flops,
    steps_to,
    tokens_to,
    trains_generator,
)
from tango_jax.tracking.metrics import read_metrics

STARTS = {"generator_start", "verifier_start", "weights", "generator_weights", "verifier_weights"}


def compare(config: ConfigDict, workdir: Path) -> list[str]:
    """Lines for the console; none without `compare_with`. An unreadable table is one line, and no error."""
    if not config.compare_with:
        return []
    try:
        with known({arm_name(config.arm): arm_of(config)}):
            return _compare(config, workdir)
    except (ValueError, OSError) as error:
        return [f"this run is not compared with stored ones: {describe(error)}"]


def _compare(config: ConfigDict, workdir: Path) -> list[str]:
    table = on_one_line(Path(config.compare_with).name)
    if not trains_generator(arm_name(config.arm)):
        return [f"this run is not compared with those in {table}: it does not train the generator"]
    stored = stored_curves(config)
    metrics = read_metrics(workdir / "metrics.jsonl")
    own = Curve(tuple(evaluations_of(metrics, config, "", sources_of(workdir))))
    differs = set().union(*(differing(own, curve) for curve in stored.values()))
    for name, what in (("setup", f"it has {SETUP_IN_WORDS}"),
                       ("problems", f"it has other problems or prompts: {OTHER_PROBLEMS}")):
        if name in differs:
            return [f"this run is not compared with those in {table}: {what}"]
    same = f"task.data_seed {config.task.data_seed} and seed {config.seed}"
    if not stored:
        return [f"{table} has no run to compare this one with: of task {config.task.name}, {same} and another arm, "
                "made without a grid"]
    runs = {f"{arm_name(config.arm)} (this run)": own} | {f"{arm} (stored)": curve for arm, curve in stored.items()}
    width = max(map(len, runs))
    lines = [f"to an accuracy of {LEVEL:g}, compared with the runs in {table} with {same}:"]
    are_with_flops = has_flops([runs])
    lines += [f"  {run:{width}}  {_amounts(curve, are_with_flops)}" for run, curve in runs.items()]
    if reads := [run for run, curve in runs.items() if curve.evaluations[-1].scored_tokens]:
        lines.append(f"sampled tokens leave out those that a verifier reads, as in {' and '.join(reads)}")
    if differs & STARTS:
        lines.append("these are not paired: they began with different weights. The checkpoint may differ, a run may "
                     "be a fork, or stage 1 had other prompts, another kind of processor or another number of cores")
    sources = {curve.evaluations[0].source for curve in (own, *stored.values())} - {""}
    if len(sources) > 1:
        lines.append(f"they were made with different source code of tango_jax ({', '.join(sorted(sources))})")
    if differs & {"method", "policies"}:
        lines.append("they also differ in other settings, such as a schedule, a reward, a loss or a learning "
                     "rate")
    return lines


def stored_curves(config: ConfigDict) -> dict[str, Curve]:
    """{other arm: its stored run of this task, start and seed}. Raises ValueError for an unreadable table."""
    rows, unit = read_tables([config.compare_with], "compare_with"), (config.task.data_seed, config.seed)
    arms = curves_by_setting(rows).get((task_name(config.task.name), ""), {})
    with known(own_arms(rows)):
        return {arm: found[unit] for arm, found in arms.items()
                if arm != arm_name(config.arm) and trains_generator(arm) and unit in found}


def _amounts(curve: Curve, is_with_flops: bool) -> str:
    """A verifier that does not write samples no tokens, and has FLOPs alone."""
    steps, cost = steps_to(curve), f"{tokens_to(curve).x / 1000:,.0f} thousand sampled tokens"
    if is_with_flops:
        cost += f", {flops_to(curve).x / 1e12:,.2f} TFLOPs"
    if not steps.is_reached:
        return f"not within {steps.x:g} generator steps, {cost}"
    return f"{steps.x:.1f} generator steps, {cost}"
