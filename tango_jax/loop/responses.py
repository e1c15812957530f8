"""The texts of both roles: records in, token ids of the prompts out; and what was sampled in, parsed records out.

Runs before and after sampling, ahead of the rewards.
"""

import dataclasses
from collections.abc import Callable, Sequence

from tango_jax.grading import FAILURES, parse_solution, parse_verification
from tango_jax.records import Judged, Problem, Rollout, Solution, Verification
from tango_jax.rl.policy import Policy
from tango_jax.runtime import hosts
from tango_jax.tasks.own_grader import grade_own_solutions
from tango_jax.tasks.task import Task
from tango_jax.text.templates import (
    PromptTooLong,
    earlier_text,
    generator_prompt,
    second_try_prompt,
    verifier_prompt,
    with_earlier,
)
from tango_jax.text.tokenizer import Tokenizer, token_of_character

_NEW_WORKDIR = "; a workdir keeps its max_prompt, so to raise it choose a new --workdir"


@dataclasses.dataclass(frozen=True)
class CallText:
    """What depends on the text that a call asks for: how prompts are built, and how responses are parsed. CALL_TEXTS
    has one for each role, by its name, and for each prompt beside (arms.py, Call.text); turn.py reads it."""

    prompts: Callable  # (policy, parents) -> (token ids of each prompt, {count: value over all parents})
    read: Callable  # (task, tokenizer, parents, rollout, group_size) -> (records, {count: value to be summed})
    stream: str  # the random stream that the role samples from
    sample_phase: str  # phase names in the timer
    read_phase: str
    sampled: str  # what is sampled, as the progress line shows it
    reading: str  # what is done with it afterwards, as the progress line shows it

    def ended_fn(self, show_fn: Callable[[str], None], total: int) -> Callable[[int], None]:
        """Show that none of this process's responses has ended yet, and return what shows how many have."""
        share = "" if hosts.is_alone() else " of this process"

        def show(ended: int) -> None:
            show_fn(f"{ended} of {total} {self.sampled}{share} sampled")

        show(0)
        return show


def _generator_prompts(policy: Policy, problems: Sequence[Problem]) -> tuple[list[list[int]], dict]:
    """Build the prompts. Raises ValueError, in every process, if one is too long."""
    prompts = [generator_prompt(policy.template, policy.tokenizer, problem) for problem in problems]
    limit = policy.config.max_prompt
    for problem, prompt in zip(problems, prompts, strict=True):
        if len(prompt) > limit:
            raise ValueError(f"the generator's prompt for problem {problem.id} has {len(prompt)} tokens; the limit is "
                             f"{limit}: raise generator.max_prompt or filter the problem{_NEW_WORKDIR}")
    return prompts, {}


def _verifier_prompts(policy: Policy, solutions: Sequence[Solution]) -> tuple[list[list[int]], dict]:
    return _prompts_to_judge(policy, "verifier", [(one.problem, one.text, len(one.steps)) for one in solutions])


def _second_judgement_prompts(policy: Policy, parents: Sequence[Judged]) -> tuple[list[list[int]], dict]:
    """The prompts in which the blocks of a verification are what is judged."""
    asked = [with_earlier(policy.template, "second_judgement", one.problem) for one in parents]
    judged = [(problem, _earlier(one), len(one.steps)) for problem, one in zip(asked, parents, strict=True)]
    return _prompts_to_judge(policy, "second_judgement", judged)


def _prompts_to_judge(policy: Policy, name: str, judged: Sequence[tuple]) -> tuple[list[list[int]], dict]:
    """Build prompts about (problem, text, number of its steps); texts that are too long for the prompt are cut off at
    the end and counted.

    Raises ValueError, in every process, if one is too long even without its text.
    """
    try:
        built = [verifier_prompt(policy.template, policy.tokenizer, *one, policy.config.max_prompt) for one in judged]
    except PromptTooLong as error:
        raise ValueError(f"{error}{_NEW_WORKDIR}") from error
    return [ids for ids, _ in built], _shortened(name, built)


def _shortened(name: str, built: Sequence[tuple[list[int], bool]]) -> dict[str, float]:
    shortened = sum(is_shortened for _, is_shortened in built)
    return {f"{name}/prompts_shortened": shortened, f"{name}/shortened_rate": shortened / len(built)}


def _second_try_prompts(policy: Policy, parents: Sequence[Judged]) -> tuple[list[list[int]], dict]:
    limit = policy.config.max_prompt
    built = [second_try_prompt(policy.template, policy.tokenizer, one.problem, _earlier(one), limit) for one in parents]
    return [ids for ids, _ in built], _shortened("second_solution", built)


def _earlier(judged: Judged) -> str:
    return earlier_text(judged.solution.text, judged.verification.text)


def _read_solutions(
    task: Task, tokenizer: Tokenizer, problems: Sequence[Problem], rollout: Rollout, group_size: int
) -> tuple[list[Solution], dict]:
    owners = [problem for problem in problems for _ in range(group_size)]
    decoded = [tokenizer.decode_with_ends(tokens) for tokens in rollout.tokens]
    report = grade_own_solutions(task, owners, [text for text, _ in decoded])
    solutions = [
        make_solution(task, problem, text, ends, is_correct, is_truncated)
        for problem, (text, ends), is_correct, is_truncated in zip(
            owners, decoded, report.correct, rollout.is_truncated_B, strict=True
        )
    ]
    return solutions, {f"grader/{name}": getattr(report, name) for name in FAILURES}


def _read_verifications(
    _: Task, tokenizer: Tokenizer, parents: Sequence[Solution | Judged], rollout: Rollout, group_size: int
) -> tuple[list[Verification], dict]:
    owners = [parent for parent in parents for _ in range(group_size)]
    decoded = [tokenizer.decode_with_ends(tokens) for tokens in rollout.tokens]
    verifications = [
        make_verification(judged, text, ends, is_truncated)
        for judged, (text, ends), is_truncated in zip(owners, decoded, rollout.is_truncated_B, strict=True)
    ]
    return verifications, {}


def _read_second_tries(
    task: Task, tokenizer: Tokenizer, parents: Sequence[Judged], rollout: Rollout, group_size: int
) -> tuple[list[Solution], dict]:
    problems = [one.problem for one in parents]
    solutions, failures = _read_solutions(task, tokenizer, problems, rollout, group_size)
    return solutions, {name.replace("grader/", "grader/second_solution_"): count for name, count in failures.items()}


def make_solution(
    task: Task, problem: Problem, text: str, ends: Sequence[int], is_correct: bool, is_truncated: bool = False
) -> Solution:
    """Parse one generator response; `ends` holds the number of characters complete after each token."""
    parsed = parse_solution(text, task.min_steps)
    return Solution(
        problem=problem,
        text=text,
        steps=parsed.steps,
        step_ends=tuple(token_of_character(ends, end - 1) for _, end in parsed.step_spans),
        format_score=parsed.format_score,
        is_correct=bool(is_correct),
        gold_steps=task.gold_steps(problem, parsed.steps) if task.gold_steps else None,
        token_ends=tuple(ends),
        is_truncated=bool(is_truncated),
    )


def make_verification(judged: Solution | Judged, text: str, ends: Sequence[int], is_truncated: bool) -> Verification:
    """Parse one verifier response about `judged`; `ends` holds the number of characters complete after each token."""
    parsed = parse_verification(text, len(judged.steps), judged.format_score)
    return Verification(
        text=text,
        judgements=parsed.judgements,
        verdict=parsed.verdict,
        format_score=parsed.format_score,
        is_aligned=parsed.aligned,
        blocks=parsed.blocks,
        token_ends=tuple(ends),
        is_truncated=bool(is_truncated),
    )


CALL_TEXTS = {
    "generator": CallText(
        _generator_prompts, _read_solutions, stream="solve", sample_phase="sample", read_phase="grade",
        sampled="solutions", reading="grading solutions",
    ),
    "verifier": CallText(
        _verifier_prompts, _read_verifications, stream="verify", sample_phase="verify", read_phase="verify",
        sampled="verifications", reading="reading verifications",
    ),
    "second_solution": CallText(
        _second_try_prompts, _read_second_tries, stream="second_solution", sample_phase="sample", read_phase="grade",
        sampled="second tries", reading="grading second tries",
    ),
    "second_judgement": CallText(
        _second_judgement_prompts, _read_verifications, stream="second_judgement", sample_phase="verify",
        read_phase="verify", sampled="second judgements", reading="reading second judgements",
    ),
}  # fmt: skip
