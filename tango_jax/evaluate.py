"""Evaluation: any checkpoint on published sets from the command line, and both roles, greedy, during training.

    python -m tango_jax.evaluate --checkpoint=MODEL --sets=math500,gsm8k --samples=8 --verifier=MODEL --out=runs/eval
    python -m tango_jax.evaluate --verifier=runs/mine --sets=processbench --out=runs/processbench
    python -m tango_jax.evaluate --checkpoint=MODEL.gguf --sets=gsm8k:test.jsonl --problems=100 --out=runs/gsm8k

A checkpoint is a Hugging Face folder, a hub id, a .gguf file, or the workdir of a run, which brings its templates and
lengths. Sets to solve: math500, aime24, aime25, amc23, olympiadbench (together: math), bgqa, cruxeval, strategyqa,
tablebench (together: out_of_domain), gsm8k, last_letter. Sets to judge: processbench (or processbench_gsm8k, _math,
_olympiadbench, _omnimath), last_letter_steps. NAME:SOURCE takes the rows from a JSONL, JSON or parquet file or a hub
id; a group takes a folder with a file for each of its sets.

Every problem is solved greedily once, and --samples times sampled. With --verifier every solution is judged, and best
of k and weighted votes are compared with the majority and with an oracle. The folder then holds tables.md, tables.csv,
samples.png and rows/SET.jsonl. Interrupted, the same command goes on with the shard that was in hand.
"""

import logging
import sys
from collections.abc import Sequence

from tango_jax.cli import session as runtime
from tango_jax.evaluation.command import evaluate_checkpoint, process_config
from tango_jax.evaluation.settings import parse_settings
from tango_jax.grading import FAILURES, grade_many
from tango_jax.loop.read import make_solution
from tango_jax.loop.rollouts import solve, verify
from tango_jax.records import Solution, Verification
from tango_jax.runtime import rng
from tango_jax.runtime.lock import hold
from tango_jax.runtime.model_text import error_line
from tango_jax.tracking.scores import generator_scores, verifier_scores

log = logging.getLogger(__name__)


def fixed_pool(task, size: int) -> list[Solution]:
    """The solutions on which the verifier is measured throughout: the same in every run of a task; maybe none."""
    pool = []
    if task.pool_solution is None:
        return pool
    chosen = [task.pool_solution(index) for index in range(size)]
    report = grade_many([text for _, text in chosen], [problem.answer for problem, _ in chosen], task.grade_kind)
    if failed := sum(getattr(report, name) for name in FAILURES):
        log.warning("%d of the %d solutions of the fixed pool count as wrong, because the grader could not judge them",
                    failed, size)  # fmt: skip
    for (problem, text), is_correct in zip(chosen, report.correct, strict=True):
        pool.append(make_solution(task, problem, text, [], is_correct))
    return pool


def evaluate_generator(loop, states, key_data) -> tuple[dict, list[Solution]]:
    """Greedy accuracy on the held-out problems, in all and by problem size; and the solutions."""
    asked, there_are = loop.config.eval.problems, loop.task.num_test
    problems = [loop.task.test_problem(index) for index in range(asked if there_are is None else min(asked, there_are))]
    solutions, rollout, solve_metrics = solve(loop, states, problems, 1, key_data, is_greedy=True)
    scores = generator_scores(solutions, rollout.is_truncated_B)
    names = {"truncation_rate": "eval_truncation_rate"}  # turns have a truncation_rate of their own
    metrics = {f"generator/{names.get(name, name)}": value for name, value in scores.items()}
    # Answers that count as wrong because the grader could not tell; turns have counts of their own.
    metrics |= {f"grader/eval_{name}": solve_metrics[f"grader/{name}"] for name in FAILURES}
    return metrics, solutions


def evaluate_verifier(loop, states, solutions, key_data, prefix: str) -> tuple[dict, list[Verification]]:
    """Greedy verification of the solutions, scored, with the shares that were cut; and the verifications."""
    verifications, *_, verify_metrics = verify(loop, states, solutions, 1, key_data, is_greedy=True)
    scores = verifier_scores(solutions, verifications)
    scores |= {name: verify_metrics[f"verifier/{name}"] for name in ("truncation_rate", "shortened_rate")}
    return {f"verifier/{prefix}/{name}": value for name, value in scores.items()}, verifications


def evaluate(loop, states, pool: list[Solution]) -> tuple[dict, list[Solution], list[Verification]]:
    """Both roles, greedy: metrics, the generator's solutions, and the verifier's answers to them."""
    key_data = rng.step_key(loop.config.seed, "evaluate")
    metrics, solutions = evaluate_generator(loop, states, key_data)
    live, verifications = evaluate_verifier(loop, states, solutions, key_data, "live")
    fixed = evaluate_verifier(loop, states, pool, key_data, "pool")[0] if pool else {}
    return metrics | fixed | live, solutions, verifications


def main(argv: Sequence[str] | None = None) -> None:
    try:
        settings = parse_settings(__doc__, argv)
    except ValueError as error:
        sys.exit(error_line(error))
    with runtime.session(process_config(settings), settings.out) as console, hold(settings.out, console):
        evaluate_checkpoint(settings, console)


if __name__ == "__main__":
    main()
