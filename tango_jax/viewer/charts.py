"""The charts of training: takes a run, returns a section of panels (panels.py) and its headline.

Curves of metrics that a run did not log are missing, and panels without curves are left out.
"""

from tango_jax.method.arms import BLACK, BLUE, GREEN, GREY, VERMILION
from tango_jax.tracking.curves import SCORES, Series, series
from tango_jax.tracking.intervals import wilson
from tango_jax.tracking.metrics import TURN_PHASES
from tango_jax.viewer.panels import line, noisy, panel, share, with_content
from tango_jax.viewer.runs import Run

TURN = "turn (both roles)"  # label of the x axis


def training(run: Run) -> list[dict]:
    """Figure 1: both roles over training, with health metrics."""
    rows = run.rows

    def of(name: str, phases=TURN_PHASES, x: str = "step") -> Series:
        return series(rows, phases, x, name)

    def both(name: str) -> list[dict]:
        return noisy("generator", of(f"generator/{name}", {"generator"}), VERMILION) + noisy(
            "verifier", of(f"verifier/{name}", {"warmup", "verifier"}), BLUE, "--"
        )

    warmup, sampled = warmup_shade(rows), _sampled_in_a_turn(run)
    accuracy = share("greedy, held out", of("generator/accuracy", {"eval"}), _evaluated(run), VERMILION)
    accuracy += line("greedy, with second tries", of("second_try/eval_final_accuracy", {"eval"}), GREEN, "--", "x")
    reward = noisy("sampled, in training", of("generator/reward/outcome", {"generator"}), GREY, "--")
    reward += noisy("labels that agree with the grade", of("generator/label_accuracy", {"generator"}), BLUE, ":")
    f1 = line("verdicts, macro-F1", of("verifier/pool/outcome_f1", {"eval"}), BLUE, "--", "square")
    f1 += line("steps, macro-F1", of("verifier/pool/step_f1", {"eval"}), GREEN, "-", "triangle-up")
    verdicts = noisy("agrees with the grader", of("verifier/reward/correctness"), GREEN)
    verdicts += noisy("says CORRECT", of("verifier/rate_correct"), BLUE, "--")
    verdicts += noisy("share of correct answers", of("verifier/solutions_correct"), GREY, ":")
    verdicts += noisy("INVALID", of("verifier/rate_invalid"), VERMILION, "-.")
    verdicts += noisy("quality by a second judgement", of("verifier/reward/quality"), BLACK)
    tried = noisy("tried again", of("second_try/share"), GREY, "--")
    tried += noisy("mended", of("second_try/mended"), GREEN)
    tried += noisy("broken", of("second_try/broken"), VERMILION, ":")
    believed = noisy("trust", of("generator/trust", {"generator"}), VERMILION)
    believed += noisy("share of the solutions that are judged", of("generator/judged_share", {"generator"}), GREY, "--")
    pool = run.settings["eval.pool"]
    return with_content(
        [
            panel("Generator", f"Share of correct answers: greedy on {_evaluated(run)} held-out problems, with its "
                  f"95 % interval, and of the {sampled} sampled in a turn.", accuracy + reward, TURN,
                  score=True, **warmup),
            panel("Verifier on the fixed pool", f"Agreement with the known labels on {pool} fixed solutions, greedy.",
                  f1, TURN, score=True, **warmup),
            panel("Verdicts in training", "How often it says CORRECT, and the share of correct solutions; of "
                  f"{sampled} verifications in a turn.", verdicts, TURN, score=True, **warmup),
            panel("Second tries", "Shares of the solutions of a turn.", tried, TURN, score=True, **warmup),
            panel("Trust in the verifier", "The factor of the step rewards' weight, and the share of the solutions "
                  "that the verifier is asked about.", believed, TURN, score=True, **warmup),
            panel("Entropy", "Nats per token; near 0 the policy no longer explores.", both("entropy"), TURN, **warmup),
            panel("KL to the reference", "For policies with a reference.", both("kl"), TURN, **warmup),
            panel("Response length", "Mean number of sampled tokens.", both("length_mean"), TURN, **warmup),
            panel("Truncated responses", f"Share of the {sampled} of a turn that reached the length limit.",
                  both("truncation_rate"), TURN, score=True, **warmup),
            panel("Log-prob gap", "Largest difference between sampler and trainer over all tokens of a turn. More than "
                  "rounding means that the cache or a mask is wrong.", both("logprob_gap_max"), TURN, **warmup),
        ]
    )  # fmt: skip


def headline(run: Run) -> list[list[str]]:
    """First and last value of the main metrics: [name, first, last, what it was measured on]."""
    evaluations, found = [row for row in run.rows if row["phase"] == "eval"], []
    pool = f"greedy, {run.settings['eval.pool']} fixed solutions"
    for title, name in SCORES.items():
        values = [row[name] for row in evaluations if row.get(name) is not None]
        if values:
            note = pool
            if name == "generator/accuracy":
                low, high = wilson(values[-1], _evaluated(run))
                note = f"[{low:.2f}, {high:.2f}], greedy, n = {_evaluated(run)}"
            found.append([title.replace(":", ""), f"{values[0]:.3f}", f"{values[-1]:.3f}", note])
    return found


def _evaluated(run: Run) -> int:
    """The number of held-out problems of an evaluation."""
    counted = (row["generator/problems"] for row in reversed(run.rows) if row.get("generator/problems"))
    return int(next(counted, run.settings["eval.problems"]))  # before the first evaluation, the setting


def responses_of_a_turn(run: Run) -> str:
    """The responses that a turn learns from."""
    problems, samples = run.settings["rl.prompts_per_step"], run.settings["rl.samples_per_prompt"]
    return f"{problems} × {samples}"


def _sampled_in_a_turn(run: Run) -> str:
    """Those from which dynamic sampling chooses what a turn learns from are sampled, too."""
    problems, samples = run.settings["rl.prompts_per_step"], run.settings["rl.samples_per_prompt"]
    further = run.settings["rl.dynamic_sampling"]
    most = f" (up to {(1 + further) * problems} × {samples} with rl.dynamic_sampling={further})" if further else ""
    return f"{responses_of_a_turn(run)}{most}"


def warmup_shade(rows: list[dict]) -> dict:
    """Shading for the turns of the warm-up."""
    steps = [row["step"] for row in rows if row["phase"] == "warmup"]
    if not steps:
        return {}
    shape = {"type": "rect", "xref": "x", "yref": "paper", "x0": 0, "x1": max(steps), "y0": 0, "y1": 1,
             "fillcolor": GREY, "opacity": 0.12, "line": {"width": 0}, "layer": "below"}  # fmt: skip
    note = {"text": "warm-up", "x": max(steps) / 2, "y": 1, "xref": "x", "yref": "paper", "yanchor": "top",
            "showarrow": False, "font": {"size": 10}}  # fmt: skip
    return {"shapes": [shape], "annotations": [note]}
