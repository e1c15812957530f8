"""Evaluate any checkpoint on published problem sets, or a verifier on labelled solutions.

    python -m tango_jax.evaluate --checkpoint=MODEL --sets=math500,gsm8k --samples=8 --verifier=MODEL --out=runs/eval
    python -m tango_jax.evaluate --verifier=runs/mine --sets=processbench --out=runs/processbench
    python -m tango_jax.evaluate --checkpoint=MODEL.gguf --sets=gsm8k:test.jsonl --problems=100 --out=runs/gsm8k

A checkpoint is a Hugging Face folder, a hub id, a .gguf file, or the workdir of a run. Runs and their exports keep
their templates and lengths.

Sets to solve: math500, aime24, aime25, amc23, olympiadbench (together: math), bgqa, cruxeval, strategyqa, tablebench
(together: out_of_domain), gsm8k, last_letter, state_tracking. Sets to judge: processbench (or processbench_gsm8k,
_math, _olympiadbench, _omnimath), last_letter_steps, state_tracking_steps. NAME:SOURCE reads the rows from a JSONL,
JSON or parquet file or a hub id; for a group, SOURCE is a folder with one file per set.

With --grader=FILE.py:name, a function (problem, answer) -> bool decides what is right, like task.grader in training,
and published figures are left out. In the sets of a run's synthetic task, the run's grader decides. If a grader's file
has changed, the same command grades the stored solutions again.

Every problem is solved once greedily, and --samples times with sampling. With --verifier every solution is judged, and
best-of-k and weighted voting are compared with majority voting and an oracle, for the same k and for the same cost: by
the written verdicts, by their P(CORRECT), and by P(CORRECT) of steps that are read in one pass (as judge --scored
does). A verifier that writes nothing is read alone: with --scored, where it was trained so (arms scored and
scored_exact, your own with is_scored=True), or a process reward model, whose first error is the first step with a
probability below 1/2.

An accuracy at k is the mean over all choices of k of the --samples, ties drawn evenly. Beside it stands its cost per
problem, in sampled tokens and in FLOPs of forward passes without padding: the prompt once, and k times a sample and
its judgement on average. A verification's prompt counts once for all --votes.

The output folder gets tables.md, tables.csv (with the costs), cost.png (accuracy over tokens and over FLOPs) and
rows/SET.jsonl. If interrupted, the same command resumes at the unfinished shard.
"""

from collections.abc import Sequence

from tango_jax.cli.session import session
from tango_jax.evaluation.command import evaluate_checkpoint, process_config
from tango_jax.evaluation.settings import parse_settings
from tango_jax.runtime.failures import ends_in_one_line
from tango_jax.runtime.lock import locked


def main(argv: Sequence[str] | None = None) -> None:
    with ends_in_one_line():
        settings = parse_settings(__doc__, argv)
    with session(process_config(settings.judge), settings.out) as console, locked(settings.out, console):
        evaluate_checkpoint(settings, console)


if __name__ == "__main__":
    main()
