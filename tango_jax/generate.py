"""Stage 0: a teacher writes tagged solutions to the problems of `task.train`. Stage 1 of the generator imitates them.

    python -m tango_jax.generate --config=llama3_1_70b_teacher --workdir=runs/teacher

The teacher is generator.checkpoint, with the generator's prompts (template, use_chat, max_prompt, max_response and
buckets). The keys under `generate` set how many solutions are sampled, and how. Solutions with steps and a boxed answer
that were not cut off are kept, wrong ones too. DIR/parts holds all solutions, DIR/train.parquet and
DIR/validation.parquet the kept ones, DIR/counts.json their numbers. The same command resumes; it grades again if the
file of `task.grader` has changed. With --config.task.stage_one=DIR, stage 1 trains on train.parquet and measures its
held-out loss on validation.parquet.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from tango_jax.cli.command_line import parse_command_line
from tango_jax.cli.session import session
from tango_jax.data.problem_sets import load_problems, question_key
from tango_jax.data.teacher_rows import (
    FILES,
    MAX_PROBLEMS,
    TeacherRow,
    keep_rows,
    part_path,
    read_part,
    validation_questions,
    write_files,
    write_part,
)
from tango_jax.grading import check_grader, parse_solution
from tango_jax.records import Problem
from tango_jax.rl.policy import Policy, make_policy
from tango_jax.runtime import hosts, rng
from tango_jax.runtime.atomic import write_json_atomic
from tango_jax.runtime.checks import require
from tango_jax.runtime.console import Console
from tango_jax.runtime.keys import MAX_SAMPLES
from tango_jax.runtime.lock import locked
from tango_jax.sampling.sampler import SampleRequest
from tango_jax.tasks.own_grader import OwnGrader, grade_solutions, grader_of, try_grader, version_of
from tango_jax.text.templates import generator_prompt, templates_digest
from tango_jax.text.tokenizer import Tokenizer
from tango_jax.tracking.run_config import check_config, keep_config
from tango_jax.weights.workdir import identify_weights, start_source

_DRAW_STREAM = 3
SHARD_PROBLEMS = 256  # of a shard, which is written at once; an interruption loses at most one
CHOICES = "--config=llama3_1_70b_teacher is a shipped teacher, and a FILE.py can make a teacher of any model"
TEACHER = "teacher.json"  # in the workdir: digests of the teacher's weights and of its template


class Work(NamedTuple):
    problems: tuple[tuple[int, Problem], ...]  # with their indices in the file, ascending
    num_too_long: int
    grade_kind: str
    is_correct: OwnGrader | None  # None: answers are compared
    min_steps: int

    def shards(self, size: int) -> list[tuple[tuple[int, Problem], ...]]:
        return [self.problems[start : start + size] for start in range(0, len(self.problems), size)]


def plan_work(config: ConfigDict, template: str, tokenizer: Tokenizer) -> Work:
    """Leaves out problems with prompts longer than generator.max_prompt."""
    problem_set = load_problems(config.task.train)
    numbered = list(enumerate(problem_set.problems))
    if len(numbered) > MAX_PROBLEMS:
        raise ValueError(f"task.train={config.task.train} has {len(numbered)} problems; at most {MAX_PROBLEMS} can be "
                         "solved in one workdir: split the file")
    if 0 < config.generate.problems < len(numbered):
        order = np.random.default_rng((config.seed, _DRAW_STREAM)).permutation(len(numbered))
        numbered = [numbered[index] for index in np.sort(order[: config.generate.problems])]
    limit = config.generator.max_prompt
    lengths = [len(generator_prompt(template, tokenizer, problem)) for _, problem in numbered]
    fitting = tuple(pair for pair, length in zip(numbered, lengths, strict=True) if length <= limit)
    if not fitting:
        raise ValueError(f"none of the {len(numbered)} problems of {config.task.train} has a prompt within "
                         f"generator.max_prompt={limit} tokens (the shortest has {min(lengths)}): raise it")
    num_too_long = len(numbered) - len(fitting)
    return Work(fitting, num_too_long, problem_set.grade_kind, grader_of(config.task), config.task.min_steps)


def solve(
    config: ConfigDict,
    policy: Policy,
    weights: dict,
    shard: Sequence[tuple[int, Problem]],
    work: Work,
    console: Console,
) -> list[TeacherRow]:
    """Sample and grade `generate.samples` solutions per problem of a shard, problem by problem."""
    generate, tokenizer = config.generate, policy.tokenizer
    owners = [(number, sample, problem) for number, problem in shard for sample in range(generate.samples)]
    request = SampleRequest(
        prompts=[generator_prompt(policy.template, tokenizer, problem) for _, problem in shard],
        group_size=generate.samples,
        key_data=rng.step_key(config.seed, "generate"),
        temperature=generate.temperature,
        top_p=config.generator.top_p,
        top_k=config.generator.top_k,
        row_numbers=[number * MAX_SAMPLES + sample for number, sample, _ in owners],
    )
    rollout = policy.sampler.sample(weights, request)
    texts = [tokenizer.decode(tokens).strip() for tokens in rollout.tokens]
    rows = [
        TeacherRow(
            number=number,
            sample=sample,
            problem_id=problem.id,
            question=problem.question,
            answer=problem.answer,
            solution=text,
            is_correct=False,
            format_score=float(parse_solution(text, work.min_steps).format_score),
            is_truncated=bool(is_truncated),
            num_tokens=len(tokens),
        )
        for (number, sample, problem), text, is_truncated, tokens in zip(
            owners, texts, rollout.is_truncated_B, rollout.tokens, strict=True
        )
    ]
    return graded(rows, shard, work, console)


def graded(
    rows: Sequence[TeacherRow], shard: Sequence[tuple[int, Problem]], work: Work, console: Console
) -> list[TeacherRow]:
    problems, texts = dict(shard), [row.solution for row in rows]
    report = grade_solutions(work, [problems[row.number] for row in rows], texts)
    if failed := report.errors + report.timeouts + report.overlong:
        console.log(f"counted as wrong because grading failed: {report.errors} errors, {report.timeouts} timeouts, "
                    f"{report.overlong} overlong ({failed} of {len(texts)} solutions of this part)")
    return [
        dataclasses.replace(row, is_correct=bool(is_correct), graded_by=version_of(work.is_correct))
        for row, is_correct in zip(rows, report.correct, strict=True)
    ]


def read_graded(
    path: Path, shard: Sequence[tuple[int, Problem]], samples: int, work: Work, console: Console
) -> list[TeacherRow] | None:
    """Like `read_part`; grades of another version of the grader are replaced, in the file too."""
    rows = read_part(path, shard, samples)
    if rows is not None and any(row.graded_by != version_of(work.is_correct) for row in rows):
        rows = graded(rows, shard, work, console)
        if hosts.is_first():
            write_part(path, rows)
    return rows


def solve_all(config: ConfigDict, policy: Policy, work: Work, workdir: Path, console: Console) -> list[TeacherRow]:
    """All solutions, including stored ones. Weights are read only if a part is missing. Raises ValueError."""
    shards = work.shards(SHARD_PROBLEMS)
    # On a network disk processes may see different parts: the first process decides.
    samples = config.generate.samples
    found = hosts.from_first(
        [read_graded(part_path(workdir, i), shard, samples, work, console) for i, shard in enumerate(shards)]
    )
    missing = [index for index, rows in enumerate(found) if rows is None]
    if not missing:
        return [row for rows in found for row in rows]
    weights = policy.sampler.layout(policy.load_params())
    hosts.in_first(lambda: keep_config(config, workdir / "config.json"))  # before the first part is written
    hosts.in_first(lambda: write_json_atomic(workdir / TEACHER, identify_teacher(config, policy)))
    done = sum(len(shard) for shard, rows in zip(shards, found, strict=True) if rows is not None)
    with console.stage("Stage 0: the teacher", total=len(work.problems), done=done) as progress:
        for index in hosts.own_part(missing):
            rows = solve(config, policy, weights, shards[index], work, console)
            write_part(part_path(workdir, index), rows)
            found[index] = rows
            progress.advance(
                len(shards[index]),
                phase="problem",
                correct=float(np.mean([row.is_correct for row in rows])),
                format=float(np.mean([row.format_score for row in rows])),
                truncated=float(np.mean([row.is_truncated for row in rows])),
                tokens=float(np.mean([row.num_tokens for row in rows])),
            )
    for index, rows in hosts.join_parts([(index, found[index]) for index in hosts.own_part(missing)]):
        found[index] = rows
    return [row for rows in found for row in rows]


def identify_teacher(config: ConfigDict, policy: Policy) -> dict[str, str]:
    checkpoint = config.generator.checkpoint
    weights = identify_weights(checkpoint, "generator")[1] if checkpoint else ""
    return {"weights": weights, "template": templates_digest({"generator": policy.template})}


def check_teacher(config: ConfigDict, policy: Policy, workdir: Path) -> None:
    path = workdir / TEACHER
    if not (workdir / "parts").exists():
        return
    saved, now = _read_teacher(path), identify_teacher(config, policy)
    places = {"weights": "generator.checkpoint", "template": "generator.template"}
    changed = [f"the {name} of {place}" for name, place in places.items() if saved[name] != now[name]]
    if changed:
        raise ValueError(f"{workdir / 'parts'} was made before {' and '.join(changed)} changed, and two teachers would "
                         "be mixed: put back what was there, or choose another --workdir")


def _read_teacher(path: Path) -> dict:
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        saved = None
    if not isinstance(saved, dict):
        raise ValueError(f"{path} is damaged, so it is unknown which teacher wrote the parts beside it: delete it "
                         "if weights and template are unchanged, or choose another --workdir")
    return saved


def generate(config: ConfigDict, workdir: Path, console: Console, policy: Policy | None = None) -> dict:
    """Run or resume stage 0; returns the counts. Raises ValueError."""
    if config.task.name != "math":
        raise ValueError(f"task.name={config.task.name} makes its own stage-1 examples; a teacher solves the problems "
                         "of task.name=math")
    check_config(config, workdir / "config.json")
    foreign = [name for name in FILES if (workdir / name).exists() and not (workdir / "parts").exists()]
    require(not foreign, f"{workdir} holds {' and '.join(foreign)}, which stage 0 has not made and would replace: "
            "choose another --workdir")
    require(not config.generator.adapter, f"generator.adapter={config.generator.adapter}: stage 0 samples from "
            "generator.checkpoint as it is: leave it empty, or name a folder with the adapter merged as the checkpoint")
    teacher = config.copy_and_resolve_references()
    teacher.generator.model.lora.rank = 0  # adapters are for training
    policy = policy or make_policy("generator", teacher.generator, start_source(teacher, "generator"))
    hosts.in_first(lambda: check_teacher(config, policy, workdir))
    work = plan_work(config, policy.template, policy.tokenizer)
    check_grader(work.grade_kind)
    for note in try_grader(work, work.problems[0][1]):
        console.log(note)
    console.log(f"{config.task.train}: {len(work.problems)} problems to solve, {work.num_too_long} left out because "
                f"their prompts exceed {config.generator.max_prompt} tokens")
    rows = solve_all(config, policy, work, workdir, console)
    hosts.in_first(lambda: keep_config(config, workdir / "config.json"))
    kept = keep_rows(rows)
    validation = validation_questions([problem for _, problem in work.problems], config.seed)
    counts = {
        "problems": len(work.problems), "over_long_prompts": work.num_too_long, "solutions": len(rows),
        "correct": sum(row.is_correct for row in rows), **kept.counts, "kept": len(kept.rows),
    }
    if all(question_key(row.question) in validation for row in kept.rows):
        raise ValueError(f"no solution is left for training ({_words(counts)}): look at the teacher's solutions "
                         f"in {part_path(workdir, 0)}")
    if hosts.is_first():
        counts["train"], counts["validation"] = write_files(workdir, kept.rows, validation)
        write_json_atomic(workdir / "counts.json", counts)
    console.log(_words(counts))
    return counts


def _words(counts: dict[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in counts.items())


def main(argv: Sequence[str] | None = None) -> None:
    config, workdir = parse_command_line("generate", __doc__, argv, "runs/teacher", CHOICES)
    with session(config, workdir) as console, locked(workdir, console):
        generate(config, workdir, console)
        for name in FILES:
            console.log(str(workdir / name))


if __name__ == "__main__":
    main()
