"""The charts of training: panels (panels.py), a headline and the table of alarms.

Metrics that a run did not log have no curves, and panels without curves are left out.
"""

import itertools
from collections.abc import Iterable

from tango_jax.method.arms import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION
from tango_jax.rl.own_reward import OWN
from tango_jax.tracking.alarm_rules import LIMITS
from tango_jax.tracking.alarms import Period, periods
from tango_jax.tracking.curves import SCORES, Series, series
from tango_jax.tracking.intervals import wilson
from tango_jax.tracking.metrics import TURN_PHASES
from tango_jax.tracking.scores import LEFT_OUT
from tango_jax.viewer.panels import bars, line, noisy, panel, share, with_content
from tango_jax.viewer.runs import Run

TURN = "turn (both roles)"  # label of the x axis
PHASES = ("sample", "verify", "grade", "update", "dump", "evaluate")  # in the order of a turn
LOOKS = ((VERMILION, ""), (BLUE, "/"), (PURPLE, "x"), (GREEN, "\\"), (GREY, "-"), (ORANGE, "."), (SKY, "+"))
OF_MARKS = "Of a verifier that does not write: of the two words of a mark."  # what its entropy and KL are
NATS = "Nats per token trained on."
SAMPLED = "Mean number of sampled tokens of first tries and first judgements."
FIRST_TRIES = "Second tries count only where no first ones are trained on."
NESTED = ("reshard", "turn", "grade_beside")  # their times are parts of other phases, or ran beside them


def training(run: Run) -> list[dict]:
    rows = run.rows

    def of(name: str, phases=TURN_PHASES) -> Series:
        return series(rows, phases, "step", name)

    def both(name: str) -> list[dict]:
        return noisy("generator", of(f"generator/{name}", {"generator"}), VERMILION) + noisy(
            "verifier", of(f"verifier/{name}", {"warmup", "verifier"}), BLUE, "--"
        )

    warmup = warmup_shade(rows)
    accuracy = share("greedy, held out", of("generator/accuracy", {"eval"}), _evaluated(run), VERMILION)
    accuracy += line("greedy, with second tries", of("second_try/eval_final_accuracy", {"eval"}), GREEN, "--", "x")
    reward = noisy("sampled, in training", of("generator/reward/outcome", {"generator"}), GREY, "--")
    reward += noisy("labels that agree with the grade", of("generator/label_accuracy", {"generator"}), BLUE, ":")
    own = [trace for (metric, (role, name)), (colour, _) in zip(own_rewards_in(rows).items(), itertools.cycle(LOOKS))
           for trace in noisy(f"{role}: {name}", of(metric), colour, "-" if role == "generator" else "--")]
    tried = noisy("tried again", of("second_try/share"), GREY, "--")
    tried += noisy("mended", of("second_try/mended"), GREEN)
    tried += noisy("broken", of("second_try/broken"), VERMILION, ":")
    believed = noisy("trust", of("generator/trust", {"generator"}), VERMILION)
    believed += noisy("share of the trained solutions that are judged", of("generator/judged_share", {"generator"}),
                      GREY, "--")
    return with_content(
        [
            panel("Generator", f"Share of correct answers: greedy on {_evaluated(run)} held-out problems, with its "
                  "95 % interval, and of the solutions sampled in a turn.", accuracy + reward, TURN,
                  score=True, **warmup),
            panel("Own rewards", "Means of the functions that generator.rewards and verifier.rewards name, without "
                  f"their weights. {FIRST_TRIES}", own, TURN, **warmup),
            panel("Second tries", "Shares of the solutions of a turn.", tried, TURN, score=True, **warmup),
            panel("Trust in the verifier", "The factor that trust puts on step rewards, and the share of the "
                  "solutions trained on that the verifier judges.", believed, TURN, score=True, **warmup),
            panel("Entropy", f"{NATS} Near 0 the policy no longer explores. {OF_MARKS}",
                  both("entropy"), TURN, **warmup),
            panel("KL to the reference", f"{NATS} {OF_MARKS}", both("kl"), TURN, **warmup),
            panel("Response length", SAMPLED, both("length_mean"), TURN, **warmup),
            panel("Truncated responses", "Share of a turn's first tries and first judgements that reached the length "
                  "limit.", both("truncation_rate"), TURN, score=True, **warmup),
            panel("Log-prob gap", "Largest difference between sampler and trainer over the tokens trained on. More "
                  "than rounding means that the cache or a mask is wrong.", both("logprob_gap_max"), TURN, **warmup),
        ]
    )


def own_rewards_in(rows: Iterable[dict]) -> dict[str, tuple[str, str]]:
    """{metric: (role, name of the function)}, by roles."""
    found = {metric: metric.split(f"/{OWN}") for row in rows for metric in row if f"/{OWN}" in metric}
    return {metric: tuple(found[metric]) for metric in sorted(found)}


def alarms(run: Run) -> dict:
    """{"note": a sentence, "rows": one per period of an alarm}."""
    found, latest = periods(run.rows), max((row["step"] for row in run.rows), default=0)
    made = run.turns_made
    if not found:
        few = f" Most are raised after {LIMITS.window} turns of a role." if made < LIMITS.window else ""
        return {"note": f"No alarms in {made} turn{'s' * (made != 1)}.{few}", "rows": []}
    going_on = sum(period.last is None for period in found)
    note = f"Alarms in {made} turns: {len(found)} ({going_on} still active at the last turn)."
    return {"note": note, "rows": [_alarm(period, latest) for period in found]}


def _alarm(period: Period, latest: int) -> dict:
    last = latest if period.last is None else period.last
    turns = f"{period.first}" if last == period.first else f"{period.first} to {last}"
    what = period.alarm  # None if another version, with other limits, raised it
    return {
        "name": period.name,
        "turns": turns + (" (still active)" if period.last is None else ""),
        "range": [period.first, last],
        "seen": what.seen if what else "raised under different limits",
        "limit": what.limit if what else "",
        "advice": what.advice if what else "",
    }


def speed(run: Run) -> list[dict]:
    rows = run.rows

    def of(name: str) -> Series:
        return series(rows, (*TURN_PHASES, "eval") if "evaluate" in name else TURN_PHASES, "step", name)

    timed = {name[5:-2] for row in rows for name in row if name.startswith("time/") and name.endswith("_s")}
    usual, others = [phase for phase in PHASES if phase in timed], sorted(timed - {*PHASES, *NESTED})
    looks = zip((*usual, *others), itertools.cycle(LOOKS))
    times = [trace for phase, look in looks for trace in bars(phase, of(f"time/{phase}_s"), *look)]
    return with_content(
        [
            panel("Seconds per turn", "By phase; an evaluation is shown at the turn before it.", times, TURN, "s",
                  barmode="stack", bargap=0.05),
            panel("Speed of sampling", "Tokens sampled by both roles per second of sampling.",
                  noisy("tokens/s", of("throughput/sampled_tokens_per_s"), GREEN), TURN, "tokens/s"),
        ]
    )


def headline(run: Run) -> list[list[str]]:
    """First and last value of the main metrics: [name, first, last, what it was measured on]."""
    evaluations, found = [row for row in run.rows if row["phase"] == "eval"], []
    pool = f"greedy, {pool_size(run)} fixed solutions"
    for title, name in SCORES.items():
        values = [row[name] for row in evaluations if row.get(name) is not None]
        if values:
            stops = name == "verifier/pool/step_f1" and run.settings.get("verifier.stop_at_first_error")
            note = pool + f"; {LEFT_OUT}" * bool(stops)
            if name == "generator/accuracy":
                low, high = wilson(values[-1], _evaluated(run))
                note = f"[{low:.2f}, {high:.2f}], greedy, n = {_evaluated(run)}"
            found.append([title.replace(":", ""), f"{values[0]:.3f}", f"{values[-1]:.3f}", note])
    return found


def _evaluated(run: Run) -> int:
    return _counted(run, "generator/problems", "eval.problems")


def pool_size(run: Run) -> int:
    return _counted(run, "verifier/pool/solutions", "eval.pool")


def _counted(run: Run, name: str, setting: str) -> int:
    """Where no evaluation has the number, the setting."""
    return int(next((row[name] for row in reversed(run.rows) if row.get(name)), run.settings[setting]))


def warmup_shade(rows: list[dict]) -> dict:
    steps = [row["step"] for row in rows if row["phase"] == "warmup"]
    if not steps:
        return {}
    shape = {"type": "rect", "xref": "x", "yref": "paper", "x0": 0, "x1": max(steps), "y0": 0, "y1": 1,
             "fillcolor": GREY, "opacity": 0.12, "line": {"width": 0}, "layer": "below"}
    note = {"text": "warm-up", "x": max(steps) / 2, "y": 1, "xref": "x", "yref": "paper", "yanchor": "top",
            "showarrow": False, "font": {"size": 10}}
    return {"shapes": [shape], "annotations": [note]}
