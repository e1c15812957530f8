"""Judge given solutions with a verifier: JSONL rows with a problem and a solution in, judgements and P(CORRECT) out.

    python -m tango_jax.judge --verifier=runs/mine --file=solutions.jsonl --out=judged.jsonl
    python -m tango_jax.judge --verifier=MODEL --file=hub:Qwen/ProcessBench/gsm8k --samples=8 --out=judged.jsonl

A verifier is a Hugging Face folder, a hub id, a .gguf file, or the workdir of a run. Runs and their exports keep their
templates and lengths. It may be a process reward model, such as Qwen2.5-Math-PRM or what TRL's PRMTrainer saves: it
reads the steps in one pass and writes no text, and its "p_verdict" is that of the worst step.

A row has "problem", and "steps" (a list of strings) or else "solution": a text with <step>...</step> around its steps,
or plain text that --split cuts into steps. JSON lists, parquet files and hub datasets are read as well.

A row of --out has the fields of its row of --file, such as a label, and
  verifications   one for each of --samples, or a single one where nothing is sampled (--scored, process reward
                  models): "judgements" (true, false, or null: no mark) and "p_steps", one for each judged step;
                  "verdict" (CORRECT, INCORRECT or INVALID) and "p_verdict"; "text", empty with --scored; "is_aligned":
                  there is one judgement for each step; "is_truncated". A verifier that stops at the first error
                  (--template=math_first_error, or as in the run) has null for the steps after it
  mean            "correct_verdict", the share of all verifications with the verdict CORRECT; "p_verdict", over those
                  that have a verdict; over the aligned ones, for each step, "p_steps" and "correct_steps"

P(CORRECT) is p(CORRECT) / (p(CORRECT) + p(INCORRECT)) of the next token where the two words begin to differ, at
temperature 1, after what the verification says before it. With --scored nothing is sampled: in one pass, the marks are
read in a verification without remarks, in which the marks before are CORRECT; "p_verdict" is the product of the steps',
and the verdict is CORRECT if each of them is at least 1/2. This is quick, but unlike the text that most verifiers are
trained to write. Verifiers that were trained so (arms scored and scored_exact, your own with is_scored=True), and
their exports, are always read so.

If interrupted, the same command judges the rest. From Python:

    from tango_jax.judge import judge
    judge([{"problem": "What is 3 + 4?", "steps": ["3 + 4 = 7"]}], "runs/mine", samples=8)
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tango_jax.cli.arguments import Parser
from tango_jax.cli.ranges import check_options
from tango_jax.cli.session import configured
from tango_jax.data.rows import Row, read_rows
from tango_jax.evaluation.command import process_config
from tango_jax.evaluation.judging import SPLITS, JudgeSettings, judge_rows, summary
from tango_jax.evaluation.settings import VERIFIER_TOKENS
from tango_jax.runtime import hosts
from tango_jax.runtime.checks import file_to_write, one_of, require
from tango_jax.runtime.console import Console
from tango_jax.runtime.failures import ends_in_one_line
from tango_jax.runtime.keys import COUNT, COUNT_OR_NONE, MAX_SAMPLES, SAMPLED_TEMPERATURE, SEED, Range
from tango_jax.sampling.checkpoint_sampler import CheckpointSamplerSettings
from tango_jax.weights.source import kind_of

RANGES = {
    "samples": Range(1, MAX_SAMPLES), "temperature": SAMPLED_TEMPERATURE._replace(why=": one sample is greedy"),
    "max_prompt": COUNT_OR_NONE, "max_new": COUNT_OR_NONE, "rows": COUNT, "decode_tensor": COUNT, "seed": SEED,
}


def judge(rows: Sequence[Mapping[str, Any]], verifier: str, /, **options: Any) -> list[dict[str, Any]]:
    """The rows with their judgements. `options`: those of the command line. ValueError: a row cannot be judged."""
    args = _parser().parse_args([f"--verifier={verifier}", "--file=", "--out="])
    unknown = sorted(options.keys() - vars(args).keys())
    require(not unknown, f"judge has no option {', '.join(unknown)}; it has {', '.join(vars(args))}")
    vars(args).update(options)
    named = [Row(f"row {number}", f"rows/{number}", dict(fields)) for number, fields in enumerate(rows, 1)]
    return judge_rows(named, verifier, _settings(args), Console(enabled=False))


def main(argv: Sequence[str] | None = None) -> int:
    with ends_in_one_line("what was judged is kept: the same command judges the rest"):
        args = _parser().parse_args(argv)
        settings, out = _settings(args), file_to_write("--out", args.out)
        kind_of(args.verifier)
        with configured(process_config(args.verifier)) as console:
            require(hosts.is_alone(), "judge runs in one process: start it without the addresses of others")
            rows = read_rows(args.file)
            results = judge_rows(rows, args.verifier, settings, console, out)
            console.log(f"{out}: {summary(results)}")
    return 0


def _settings(args: argparse.Namespace) -> JudgeSettings:
    """Raises ValueError for a value outside of its range."""
    check_options(args, RANGES)
    if args.split:
        one_of("--split", args.split, SPLITS)
    sampler = CheckpointSamplerSettings(
        args.template, args.max_prompt, args.max_new, args.use_chat, args.dtype, args.rows,
        default_tokens=VERIFIER_TOKENS, decode_tensor=args.decode_tensor)
    return JudgeSettings(args.split, args.samples, args.temperature, args.scored, args.seed, sampler)


def _parser() -> Parser:
    parser = Parser("judge", __doc__)
    parser.add_argument("--verifier", "--checkpoint", required=True, help="what judges")
    parser.add_argument("--file", required=True, help="rows with problems and solutions")
    parser.add_argument("--out", required=True, help="JSONL file of the judged rows")
    parser.add_argument("--split", default="", help="cuts a solution without <step> tags: blank_line or line")
    parser.add_argument("--samples", type=int, default=1, help="verifications of a solution; 1: greedy, more: sampled")
    parser.add_argument("--temperature", type=float, default=1.0, help="of several samples")
    parser.add_flag("--scored", "read the marks in one pass, without sampling")
    parser.add_argument("--template", help="name or file (default: math, or as in the run)")
    parser.add_flag("--use_chat", "prompts in the checkpoint's chat template (default: as in the run)")
    parser.add_argument("--max_prompt", type=int, default=0, help="tokens of a prompt; 0: 4096, or as in the run")
    parser.add_argument("--max_new", type=int, default=0, help="tokens of a verification; 0: 4096, or as in the run")
    parser.add_argument("--rows", type=int, default=64, help="verifications decoded at once; limited by memory")
    parser.add_argument("--decode_tensor", type=int, default=1, help="devices that share the weights")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the weights, in memory")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling; default: %(default)s")
    return parser


if __name__ == "__main__":
    sys.exit(main())
