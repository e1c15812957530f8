"""A finished run beside stored runs of other arms: what the verifier's judgements bought, and what they cost.

In: the run's evaluations, and the table that `compare_with` names (see evaluations.py; tango_jax.ablate writes them).
Out: comparison.png, and lines for the console. Compared are the runs of the same task, start (`task.data_seed`) and
seed, if they had the same problems, models and stage 1. Runs after the last turn, once the results are written.
"""

import dataclasses
import math
from pathlib import Path

from ml_collections import ConfigDict

from tango_jax.config import ROLES
from tango_jax.method.own_arm import arm_name, arm_of
from tango_jax.runtime.failures import describe
from tango_jax.runtime.model_text import on_one_line
from tango_jax.tracking.curves import Series, label_of, looks_of
from tango_jax.tracking.evaluations import SETUP_IN_WORDS, evaluations_of, read_tables, sources_of
from tango_jax.tracking.known_arms import arms_beside, known
from tango_jax.tracking.learning_curve import (
    LEVEL,
    Curve,
    Reached,
    curves_by_setting,
    differing,
    steps_to,
    tokens_to,
    trains_generator,
)
from tango_jax.tracking.metrics import read_metrics
from tango_jax.tracking.plots import OVER, add_legend, draw_line, make_figure, save_figure, style_accuracy

PICTURE = "comparison.png"


def compare(config: ConfigDict, workdir: Path) -> list[str]:
    """Draw comparison.png and return lines that say the same; none without `compare_with`.

    The run is finished and its results are saved: if the table has gone in the meantime, a line says so.
    """
    if not config.compare_with:
        return []
    try:
        own_arm = {arm_name(config.arm): arm_of(config)}
        with known(own_arm | arms_beside([config.compare_with])):
            return _compare(config, workdir)
    except (ValueError, OSError) as error:
        return [f"this run is not compared with stored ones: {describe(error)}"]


def _compare(config: ConfigDict, workdir: Path) -> list[str]:
    """Raises ValueError or OSError where the table or the run cannot be read, or the picture not be written."""
    picture = workdir / PICTURE
    picture.unlink(missing_ok=True)  # it may be of another table
    stored = stored_curves(config)
    metrics = read_metrics(workdir / "metrics.jsonl")
    own = Curve(tuple(evaluations_of(metrics, config, "", sources_of(workdir))))
    name = on_one_line(Path(config.compare_with).name)
    differs = set().union(*(differing(own, curve) for curve in stored.values()))
    if "setup" in differs:
        return [f"this run is not compared with those in {name}: it has {SETUP_IN_WORDS}"]
    if "problems" in differs:
        return [f"this run is not compared with those in {name}: its files of problems or prompts have other "
                "contents"]
    if stored:
        draw_comparison(config, own, stored, picture)
    return describe_comparison(config, own, stored)


def stored_curves(config: ConfigDict) -> dict[str, Curve]:
    """{arm: its stored run of this task, start and seed}, of all arms but the run's own that train the generator.

    Raises:
        ValueError: the table cannot be read.
    """
    curves = curves_by_setting(read_tables([config.compare_with], "compare_with"))
    arms, unit = curves.get((config.task.name, ""), {}), (config.task.data_seed, config.seed)
    return {arm: found[unit] for arm, found in arms.items()
            if arm != arm_name(config.arm) and trains_generator(arm) and unit in found}  # fmt: skip


def describe_comparison(config: ConfigDict, own: Curve, stored: dict[str, Curve]) -> list[str]:
    """Lines that say when each run reached LEVEL, and with how many sampled tokens."""
    same = f"task.data_seed {config.task.data_seed} and seed {config.seed}"
    name = on_one_line(Path(config.compare_with).name)
    if not stored:
        return [f"{name} has no run to compare this one with: of task {config.task.name}, {same} and another arm, made "
                "without a grid"]
    runs = {f"{arm_name(config.arm)} (this run)": own} | {f"{arm} (stored)": curve for arm, curve in stored.items()}
    width = max(map(len, runs))
    lines = [f"to an accuracy of {LEVEL:g}, beside the runs in {name} with {same}:"]
    lines += [f"  {run:{width}}  {_amounts(curve)}" for run, curve in runs.items()]
    if not is_paired(own, stored):
        starts = dict.fromkeys(_describe_start(curve) for curve in runs.values())
        told = (f"this run began with {', the stored ones with '.join(starts)}" if len(starts) > 1 else
                "they began with other weights and the same scores")  # fmt: skip
        lines.append(f"these are not paired: {told}. {_why_other_start(config)}")
    if any("method" in differing(own, curve) for curve in stored.values()):
        lines.append("beside the arm they differ in other settings, such as a schedule, a reward, a loss or a learning "
                     "rate")  # fmt: skip
    return lines


def _why_other_start(config: ConfigDict) -> str:
    """What may have made another start of the same settings."""
    roles = [role for role in ROLES if config[role].checkpoint or config[role].init_from]
    if roles:
        keys = [f"{role}.{key}" for role in roles for key in ("checkpoint", "init_from") if config[role][key]]
        return f"{' and '.join(keys)} may hold other weights than they had"
    return "On another kind of processor or number of cores, stage 1 sums in another order and ends in another start"


def is_paired(own: Curve, stored: dict[str, Curve]) -> bool:
    """Whether all runs began with the same weights; of those whose table does not tell, with the same scores, up to the
    digits that a table has."""
    return not any(_is_other_start(own, curve) for curve in stored.values())


def _is_other_start(own: Curve, curve: Curve) -> bool:
    if differing(own, curve) & {"generator_start", "verifier_start", "weights"}:
        return True
    first, other = own.evaluations[0], curve.evaluations[0]
    if all((first.generator_start, first.verifier_start, other.generator_start, other.verifier_start)):
        return False
    return not all(a is None or b is None or math.isclose(a, b, abs_tol=1e-5)
                   for a, b in zip(_start(own), _start(curve), strict=True))  # fmt: skip


def draw_comparison(config: ConfigDict, own: Curve, stored: dict[str, Curve], path: Path) -> None:
    """Draw accuracy over generator steps, and over the tokens that both roles sampled."""
    others = "stored ones" if is_paired(own, stored) else "stored ones from another start"
    figure = make_figure(f"{config.task.name}, seed {config.seed}: this run beside {others}")
    panels = figure.subplots(1, 2)
    looks, drawn = looks_of([arm_name(config.arm), *stored]), {}
    for axes, over in zip(panels, ("steps", "tokens"), strict=True):
        for arm, curve in reversed(stored.items()):
            drawn[label_of(arm)] = draw_line(axes, _points(curve, over), looks[arm], width=1.2)
        # The run itself on top.
        drawn[f"{label_of(arm_name(config.arm))} (this run)"] = draw_line(
            axes, _points(own, over), dataclasses.replace(looks[arm_name(config.arm)], dash="-")
        )
        style_accuracy(axes, over)
    panels[0].set_ylabel("greedy accuracy, held out", fontsize=8)
    add_legend(figure, dict(reversed(drawn.items())))
    save_figure(figure, path)


def _points(curve: Curve, over: str) -> Series:
    return Series(curve.of(OVER[over][0]), curve.of("accuracy"))


def _start(curve: Curve) -> tuple[float, float | None]:
    """Accuracy, and the verifier's step F1 where it has one, before the first turn."""
    first = curve.evaluations[0]
    return first.accuracy, first.verifier_step_f1


def _describe_start(curve: Curve) -> str:
    accuracy, step_f1 = _start(curve)
    return f"an accuracy of {accuracy:.3f}" + ("" if step_f1 is None else f" and a step F1 of {step_f1:.3f}")


def _amounts(curve: Curve) -> str:
    steps, tokens = steps_to(curve), tokens_to(curve)
    if not steps.is_reached:
        return f"not within {steps.x:g} generator steps and {_thousands(tokens)} sampled tokens"
    return f"{steps.x:.1f} generator steps, {_thousands(tokens)} sampled tokens"


def _thousands(tokens: Reached) -> str:
    return f"{tokens.x / 1000:,.0f} thousand"
