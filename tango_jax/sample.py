"""Samples a generator's solution to a question, and a verifier's judgement of each step, in the terminal.

    python -m tango_jax.sample --checkpoint=runs/last_letter --question="cat#1 dog#2"
    python -m tango_jax.sample --checkpoint=MODEL --use_chat --verifier=Qwen/Qwen2.5-Math-PRM-7B < questions.txt
    python -m tango_jax.sample --verifier=runs/last_letter --question="cat#1 dog#2" --solution=solution.txt

A checkpoint is a Hugging Face folder, a hub id, a .gguf file, or the workdir of a run. Runs and their exports keep
their templates and lengths. Without --verifier, the workdir's verifier judges; any other checkpoint judges itself. With
--second_try, after the verdict INCORRECT the generator reads its solution and the judgement, and solves again, as in
the arm second_try. Without --question, every line of standard input is a question. Lines written by a model start with
"| ", which sets them apart from output of this command. Control characters are shown as escapes.

With --solution, a text or a file, nothing is solved: the verifier judges this solution greedily, and each mark has its
P(CORRECT) beside it, as in tango_jax.judge. Without <step> tags, blank lines cut it into steps, or else its lines.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import rich.console
from rich.text import Text

from tango_jax.cli.arguments import Parser
from tango_jax.cli.ranges import check_options
from tango_jax.data.rows import Row
from tango_jax.evaluation.judging import (
    SPLITS,
    JudgeSettings,
    judge_rows,
    open_verifier,
    read_claim,
    read_solutions,
)
from tango_jax.grading import (
    ParsedSolution,
    ParsedVerification,
    parse_solution,
    parse_verification,
    why_misaligned,
)
from tango_jax.records import Problem, Verification
from tango_jax.runtime import hosts, rng
from tango_jax.runtime.checks import cut, require
from tango_jax.runtime.console import Console, working
from tango_jax.runtime.failures import ends_in_one_line
from tango_jax.runtime.keys import COUNT_OR_NONE, SEED, SHARE_ABOVE_ZERO, TEMPERATURE
from tango_jax.runtime.model_text import for_terminal, on_one_line
from tango_jax.sampling.checkpoint_sampler import (
    CheckpointSampler,
    CheckpointSamplerSettings,
    open_checkpoint_sampler,
    uses_chat,
)
from tango_jax.text.prompts import SECOND_TRY, prompt_ids, solution_of, verification_of
from tango_jax.text.templates import generator_prompt, verifier_prompt
from tango_jax.text.tokenizer import unreadable_characters

MARKS = {True: ("CORRECT", "green"), False: ("INCORRECT", "red"), None: ("no judgement", "yellow")}
VERDICT_STYLES = {"CORRECT": "bold green", "INCORRECT": "bold red", "INVALID": "bold yellow"}

RANGES = {"temperature": TEMPERATURE, "top_p": SHARE_ABOVE_ZERO, "max_new": COUNT_OR_NONE, "max_prompt": COUNT_OR_NONE,
          "seed": SEED}


class Response(NamedTuple):
    text: str
    num_tokens: int
    is_truncated: bool  # it reached the limit before its end


def sample_one(sampler: CheckpointSampler, prompt: list[int], args: argparse.Namespace, key_name: str) -> Response:
    key_data = rng.step_key(args.seed, key_name)
    rollout = sampler.sample([prompt], np.zeros((1, 1), int), key_data, args.temperature, args.top_p)
    tokens = rollout.tokens[0]
    return Response(sampler.tokenizer.decode(tokens), len(tokens), bool(rollout.is_truncated_B[0]))


def quoted(text: str, encoding: str, indent: str = "") -> str:
    """Model text for the terminal, with "| " in front of every line."""
    return "\n".join(f"{indent}| {line}" for line in for_terminal(text, encoding).split("\n"))


def question_prompt(problem: Problem, generator: CheckpointSampler, verifier: CheckpointSampler) -> list[int]:
    """The generator's prompt. Raises ValueError if either role's prompt is too long."""
    prompt = generator_prompt(generator.template, generator.tokenizer, problem)
    if len(prompt) > generator.max_prompt:
        raise ValueError(f"the question makes a prompt of {len(prompt)} tokens; the limit is {generator.max_prompt}: "
                         "shorten it, or raise --max_prompt")
    verifier_prompt(verifier.template, verifier.tokenizer, problem, "", 1, verifier.max_prompt)
    return prompt


def warn_of_unknown(
    question: str, generator: CheckpointSampler, verifier: CheckpointSampler, console: rich.console.Console
) -> None:
    samplers = {"generator": generator, "verifier": verifier}
    unknown = {role: unreadable_characters(sampler.tokenizer, [question]) for role, sampler in samplers.items()}
    shown = [f"the {role}'s tokenizer has no token for {cut(', '.join(map(repr, found)))}"
             for role, found in unknown.items() if found]
    if shown:
        text = f"warning: {' and '.join(shown)}: such a model cannot read it"
        console.print(Text(on_one_line(text, console.encoding), "yellow"))


def warn_if_cut_off(what: str, response: Response, console: rich.console.Console) -> None:
    if response.is_truncated:
        console.print(Text(f"The {what} was cut off after {response.num_tokens} tokens (raise --max_new).", "yellow"))


def answer(
    question: str,
    generator: CheckpointSampler,
    verifier: CheckpointSampler,
    args: argparse.Namespace,
    console: rich.console.Console,
) -> None:
    problem, encoding = Problem("the question", question, ""), console.encoding
    console.print(Text(f"Question: {on_one_line(question, encoding)}", style="bold"))
    warn_of_unknown(question, generator, verifier, console)
    prompt = question_prompt(problem, generator, verifier)
    with working("solving (the first question of its length is also compiled)"):
        response = sample_one(generator, prompt, args, "solve")
    text = response.text
    console.print(Text(quoted(text, encoding)))
    warn_if_cut_off("solution", response, console)
    solution = parse_solution(text, generator.min_steps)
    steps = [text[start:end] for start, end in solution.step_spans]
    prompt, is_shortened = verifier_prompt(
        verifier.template, verifier.tokenizer, problem, text, len(steps), verifier.max_prompt
    )
    with working("judging"):
        if verifier.is_sampled:
            verification = sample_one(verifier, prompt, args, "verify")
        else:
            [read] = read_solutions(verifier, [prompt], [solution_of(problem, text, len(steps))])
            verification = Response(read.text, verifier.sampler.config.cache_buckets[-1], read.is_truncated)
    judged = parse_verification(verification.text, len(steps), solution.format_score, verifier.stops)
    console.print(Text("Judgement" + (" (of the solution's first part)" if is_shortened else ""), style="bold"))
    warn_if_cut_off("verification", verification, console)
    show_judgement(solution, judged, console)
    if judged.verdict == "INCORRECT" and args.second_try:
        try_again(verification_of(problem, text, verification.text), generator, args, console)


def show_judgement(
    solution: ParsedSolution, judged: ParsedVerification, console: rich.console.Console,
    p_steps: Sequence[float | None] = (), p_verdict: float | None = None,
) -> None:
    """`p_steps`, `p_verdict`: P(CORRECT) of each mark, where it is known."""
    encoding = console.encoding
    if solution.steps and not judged.aligned:
        console.print(Text(f"{why_misaligned(judged.judgements, len(solution.steps))}: no step reward", "yellow"))
    for number, step in enumerate(solution.steps, 1):
        judgement, words, p = (of_steps[number - 1] if number <= len(of_steps) else None
                               for of_steps in (judged.judgements, judged.blocks, p_steps))
        mark, style = MARKS[judgement]
        place = f"{number}. "
        lines = quoted(step.strip(), encoding, " " * len(place))
        console.print(Text.assemble((place, "dim"), lines[len(place) :]),
                      Text.assemble((f"   {mark}", style), shown_probability(p)), sep="\n")
        if words and words.strip():
            console.print(Text(quoted(words.strip(), encoding, "   "), style="dim"))
    if not solution.steps:
        console.print(Text("The solution has no <step> blocks: no step can be judged.", "yellow"))
    console.print(Text.assemble(("Verdict: ", "bold"), (judged.verdict, VERDICT_STYLES[judged.verdict]),
                                shown_probability(p_verdict), ("   Answer: ", "bold"),
                                shown_answer(solution, encoding)))


def shown_probability(p: float | None) -> str:
    return "" if p is None else f"   P(CORRECT) = {p:.3f}"


def judge_given(args: argparse.Namespace, console: rich.console.Console) -> None:
    """The judgement of --solution. Raises ValueError, before the weights are read, where it cannot be judged."""
    text, encoding = given_solution(args.solution), console.encoding
    sampler = CheckpointSamplerSettings(
        args.verifier_template, args.max_prompt, args.max_new, uses_chat(args, "verifier"), args.dtype)
    split = "blank_line" if re.search(SPLITS["blank_line"], text.strip()) else "line"
    row = Row("--solution", "the question", {"problem": args.question, "solution": text})
    verifier, settings = args.verifier or args.checkpoint, JudgeSettings(split, seed=args.seed, sampler=sampler)
    claim = read_claim(row, settings, open_verifier(verifier, sampler))
    with working(f"judging, with the weights of {verifier}"):
        [result] = judge_rows([row], verifier, settings, Console(enabled=False))
    [found] = result["verifications"]
    parsed = parse_solution(claim.solution.text)
    remarks = parse_verification(found["text"], len(parsed.steps)).blocks  # none of a verifier that does not write
    judged = ParsedVerification(tuple(found["judgements"]), found["verdict"], 1.0, found["is_aligned"], remarks)
    console.print(Text(f"Question: {on_one_line(args.question, encoding)}", style="bold"))
    console.print(Text("Judgement", style="bold"))
    show_judgement(parsed, judged, console, found["p_steps"], found["p_verdict"])


def given_solution(text: str) -> str:
    """The contents of a file, or the text itself. Raises ValueError: it is empty, or no UTF-8."""
    try:
        text = Path(text).read_text(encoding="utf-8") if Path(text).is_file() else text
    except UnicodeDecodeError as error:
        raise ValueError(f"--solution={text} is not UTF-8 text ({error}): save it as UTF-8") from error
    except OSError:  # a text that is too long for a path
        pass
    require(bool(text.strip()), "--solution is empty: give a solution, or a file with one")
    return text


def shown_answer(solution: ParsedSolution, encoding: str) -> str:
    return "none" if solution.answer is None else on_one_line(solution.answer, encoding)


def try_again(
    judged: Verification, generator: CheckpointSampler, args: argparse.Namespace, console: rich.console.Console
) -> None:
    prompt, is_cut = prompt_ids(SECOND_TRY, generator.template, generator.tokenizer, judged, generator.max_prompt)
    with working("solving again"):
        response = sample_one(generator, prompt, args, "solve again")
    console.print(Text("Second try" + (" (after a part of the first)" if is_cut else ""), style="bold"))
    console.print(Text(quoted(response.text, console.encoding)))
    warn_if_cut_off("second try", response, console)
    solution = parse_solution(response.text, generator.min_steps)
    console.print(Text.assemble(("Answer: ", "bold"), shown_answer(solution, console.encoding)))


def checked_question(text: str) -> str:
    if not text.strip():
        raise ValueError("--question is empty: give a question, or omit the option and write one question per line")
    # Invalid UTF-8 is read as lone surrogates, which no tokenizer accepts.
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise ValueError(f"the question {text!r} is not valid Unicode: give it in UTF-8")
    return text


def questions(args: argparse.Namespace) -> Iterator[str]:
    if args.question is not None:
        yield args.question
        return
    if sys.stdin.isatty():
        print("One question per line; end with Ctrl-D.", file=sys.stderr)
    for line in sys.stdin:
        if line.strip():
            yield checked_question(line.strip())


def main(argv: Sequence[str] | None = None) -> int:
    console = rich.console.Console(highlight=False, markup=False, emoji=False, soft_wrap=True, force_jupyter=False)
    with ends_in_one_line("no more is solved"):
        args = _parse_args(argv)
        check_options(args, RANGES)
        if args.question is not None:
            checked_question(args.question)
        hosts.check_devices()
        if args.solution is not None:
            require(args.question is not None, "--solution is about a question: give --question as well")
            require(bool(args.verifier or args.checkpoint), "nothing judges --solution: name a --verifier")
            require(not args.second_try and args.temperature == 0, "--solution is judged greedily, and nothing is "
                    "solved: leave out --second_try and --temperature (tango_jax.judge samples several verifications)")
            judge_given(args, console)
            return 0
        require(args.checkpoint is not None, "nothing solves the question: name a --checkpoint, or give --solution")
        names = {"generator": args.checkpoint, "verifier": args.verifier or args.checkpoint}
        settings = {role: CheckpointSamplerSettings(
            getattr(args, f"{role}_template"), args.max_prompt, args.max_new, uses_chat(args, role), args.dtype)
            for role in names}
        samplers = {"generator": open_checkpoint_sampler("generator", names["generator"], settings["generator"]),
                    "verifier": open_verifier(names["verifier"], settings["verifier"])}
        if args.question is not None:  # before the weights are read
            question_prompt(Problem("the question", args.question, ""), *samplers.values())
        for role, sampler in samplers.items():
            with working(f"reading the weights of the {role} from {names[role]}"):
                samplers[role] = sampler.with_weights()
        for question in questions(args):
            answer(question, samplers["generator"], samplers["verifier"], args, console)
    return 0


def _parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("sample", __doc__)
    parser.add_argument("--checkpoint", help="solves the question")
    parser.add_argument("--verifier", help="what judges it")
    parser.add_argument("--question", help="default: every line of standard input")
    parser.add_argument("--solution", help="judge this text, or the text of this file, and solve nothing")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default): greedy")
    parser.add_argument("--top_p", type=float, default=1.0, help="nucleus sampling; 1 (default): every token")
    parser.add_argument("--max_new", type=int, default=0, help="tokens of a response; 0: 2048, or as in the run")
    parser.add_argument("--max_prompt", type=int, default=0, help="tokens of a prompt; 0: 2048, or as in the run")
    parser.add_argument("--template", dest="generator_template", help="name or file (default: math, or as in the run)")
    parser.add_argument("--verifier_template", help="the same for the verifier")
    parser.add_flag("--use_chat", "prompts of --checkpoint in its chat template (default: as in the run)")
    parser.add_flag("--verifier_use_chat", "the same for --verifier")
    parser.add_flag("--second_try", "solve again where the verdict is INCORRECT")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the weights, in memory")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling; default: %(default)s")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
