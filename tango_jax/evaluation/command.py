"""The settings and the work of `python -m tango_jax.evaluate`."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from tango_jax.cli.arguments import Parser
from tango_jax.cli.ranges import check_options
from tango_jax.config import ROLES, default_config
from tango_jax.evaluation.cost import CostBasis
from tango_jax.evaluation.judging import open_verifier
from tango_jax.evaluation.measures import SetResult, judge_result, solve_result
from tango_jax.evaluation.output import write_rows, write_tables
from tango_jax.evaluation.responses import (
    Pass,
    claims_of,
    judge_shard,
    read_judged,
    read_solved,
    samples_of,
    solve_shard,
)
from tango_jax.evaluation.sets import GROUPS, SYNTHETIC_STEPS, EvalSet, JudgeSet, SolveSet, grader_name, open_sets
from tango_jax.evaluation.shards import GREEDY, Shard, complete_shards, digest
from tango_jax.grading import check_grader
from tango_jax.records import Problem
from tango_jax.runtime import hosts
from tango_jax.runtime.atomic import write_json_atomic
from tango_jax.runtime.checks import differences, folder_to_write, read_json_object, require
from tango_jax.runtime.console import Console
from tango_jax.runtime.keys import COUNT, COUNT_OR_NONE, MAX_SAMPLES, SAMPLED_TEMPERATURE, SEED, SHARE_ABOVE_ZERO, Range
from tango_jax.runtime.machine import describe_machine
from tango_jax.runtime.model_text import markdown_code
from tango_jax.sampling.checkpoint_sampler import (
    CheckpointSampler,
    CheckpointSamplerSettings,
    open_checkpoint_sampler,
    template_of,
    uses_chat,
)
from tango_jax.tasks.own_grader import load_grader, try_grader
from tango_jax.text.templates import generator_prompt, load_template, verifier_prompt
from tango_jax.weights.source import kind_of
from tango_jax.weights.workdir import identify_weights, prompting_of, read_config

VERIFIER_TOKENS = 4096  # of a prompt, and of a response, as published
_SAMPLED = SAMPLED_TEMPERATURE._replace(
    why=": greedy solutions are made anyway, and one vote is greedy"
)
_JUDGED_SETS = ("processbench", *GROUPS["processbench"], *SYNTHETIC_STEPS)  # that need no solver
MAY_CHANGE = ("out", "rows", "decode_tensor")  # settings that a resumed evaluation may change
_NO_LIMIT = 1 << 30


def _option(default: Any, help: str, within: Range | None = None, names: Sequence[str] = (), **argument) -> Any:
    metadata = {"help": help, "within": within, "names": names, "argument": argument}
    return dataclasses.field(default=default, metadata=metadata)


def _tokens(what: str, default: int) -> Any:
    return _option(0, f"tokens of {what}; 0: {default}, or as in the run", COUNT_OR_NONE)


@dataclasses.dataclass(frozen=True)
class Settings:
    checkpoint: str | None = _option(None, "solves the problems, and judges if there is no --verifier")
    verifier: str | None = _option(None, "judges every solution of --checkpoint, and the sets to judge")
    sets: tuple[str, ...] = _option((), "names, separated by commas; NAME:SOURCE reads other rows", required=True)
    out: Path = _option("runs/eval", "folder of the results", names=("--workdir",))
    samples: int = _option(0, "sampled solutions of each problem; 0: greedy alone", Range(0, MAX_SAMPLES))
    temperature: float = _option(1.0, "of the sampled solutions", _SAMPLED)
    top_p: float = _option(1.0, "nucleus sampling; 1 (default): every token", SHARE_ABOVE_ZERO)
    skip_greedy: bool = _option(False, "sampled solutions alone")
    scored: bool = _option(False, "the verifier writes nothing: its marks are read in one pass, as judge --scored does "
                           "(default: as in the run)")
    votes: int = _option(1, "verifications of a solution; 1: greedy, more: sampled", Range(1, MAX_SAMPLES))
    verifier_temperature: float = _option(1.0, "of several votes", _SAMPLED)
    problems: int = _option(0, "problems of each set, drawn by --seed; 0: all (synthetic: 200)", COUNT_OR_NONE)
    grader: str | None = _option(None, "a function (problem, answer) -> bool that decides what is right, as "
                                 "task.grader does in training (default: answers are compared)",
                                 metavar="FILE.py:NAME")
    max_prompt: int = _tokens("the generator", 2048)
    max_new: int = _tokens("a response", 2048)
    template: str | None = _option(None, "name or file (default: math, or as in the run)")
    verifier_max_prompt: int = _tokens("the verifier", VERIFIER_TOKENS)
    verifier_max_new: int = _tokens("a response", VERIFIER_TOKENS)
    verifier_template: str | None = _option(None, "name or file (default: math, or as in the run)")
    use_chat: bool = _option(False, "prompts of --checkpoint in its chat template (default: as in the run)")
    verifier_use_chat: bool = _option(False, "the same for --verifier")
    dtype: str = _option("float32", "default: %(default)s", choices=("float32", "bfloat16"))
    seed: int = _option(0, "of the problems drawn and of the sampling; default: 0", SEED)
    shard: int = _option(64, "problems done at once; an interruption costs up to one shard", COUNT)
    rows: int = _option(64, "responses decoded at once; limited by memory", COUNT)
    decode_tensor: int = _option(1, "devices of a process that share the weights", COUNT)

    @property
    def judge(self) -> str:
        return self.verifier or self.checkpoint

    @property
    def passes(self) -> tuple[Pass, ...]:
        greedy, sampled = Pass((GREEDY,), 0.0, 1.0), Pass(tuple(range(self.samples)), self.temperature, self.top_p)
        return (greedy,) * (not self.skip_greedy) + (sampled,) * bool(self.samples)

    def sampler(self, role: str) -> CheckpointSamplerSettings:
        prefix, tokens = {"generator": ("", 2048), "verifier": ("verifier_", VERIFIER_TOKENS)}[role]
        own = {name: getattr(self, f"{prefix}{name}") for name in ("template", "max_prompt", "max_new")}
        shared = {name: getattr(self, name) for name in ("dtype", "rows", "decode_tensor")}
        return CheckpointSamplerSettings(**own, **shared, use_chat=uses_chat(self, role), default_tokens=tokens,
                                         max_new_flag=f"{prefix}max_new")


def parse_settings(doc: str, argv: Sequence[str] | None) -> Settings:
    """Settings from arguments. --help shows `doc` and ends the process. Raises ValueError for wrong settings."""
    fields = vars(_parser(doc).parse_args(argv))
    fields["sets"] = tuple(dict.fromkeys(part.strip() for part in fields["sets"].split(",") if part.strip()))
    fields["out"] = folder_to_write("--out", fields["out"])
    settings = Settings(**fields)
    check(settings)
    return settings


def check(settings: Settings) -> None:
    require(bool(settings.sets), "--sets is empty: name at least one")
    require(bool(settings.judge), "no model is named: --checkpoint solves, --verifier judges; give one or both")
    for name in (settings.checkpoint, settings.verifier):
        if name is not None:
            kind_of(name)
    fields = dataclasses.fields(Settings)
    check_options(settings, {one.name: within for one in fields if (within := one.metadata["within"])})
    require(settings.samples > 0 or not settings.skip_greedy,
            "--skip_greedy leaves nothing to write: set --samples to at least 1")
    for flag, is_set in ((f"--votes={settings.votes}", settings.votes > 1), ("--scored", settings.scored)):
        require(not is_set or "verifier" in models_of(settings), f"{flag} is of a verifier, and no solution is judged: "
                f"name a --verifier, or leave {flag.partition('=')[0]} out")
    uses_chat(settings, "verifier")


def models_of(settings: Settings) -> dict[str, str]:
    is_judged = [name.partition(":")[0] in _JUDGED_SETS for name in settings.sets]
    models = {} if all(is_judged) else {"generator": settings.checkpoint}
    if any(is_judged) or settings.verifier is not None:
        models["verifier"] = settings.judge
    return models


def _parser(doc: str) -> Parser:
    parser = Parser("evaluate", doc)
    for one in dataclasses.fields(Settings):
        if one.type is bool:
            parser.add_flag(f"--{one.name}", one.metadata["help"])
        else:
            kind = one.type if one.type in (int, float) else str
            parser.add_argument(f"--{one.name}", *one.metadata["names"], type=kind, default=one.default,
                                help=one.metadata["help"], **one.metadata["argument"])
    return parser

def evaluate_checkpoint(settings: Settings, console: Console) -> list[SetResult]:
    """The whole evaluation, or what is left of it. Every process returns the results; the first writes them.

    Raises ValueError, before any model runs, where the sets, a checkpoint or the output folder cannot be used. The
    generator's weights are freed before the verifier's are loaded.
    """
    sets, samplers = _open(settings, console)
    passes, votes = settings.passes, settings.votes
    temperature = settings.verifier_temperature if votes > 1 else 0.0
    num_samples = len(samples_of(passes))
    solve_shards = _shards_of(sets, SolveSet, "solved", settings)
    solved = complete_shards(
        "Solving",
        solve_shards,
        read_fn=lambda shard: read_solved(shard, samples_of(passes)),
        open_fn=lambda: _load_weights(samplers["generator"], settings),
        work_fn=lambda sampler, shard: solve_shard(sampler, shard, passes, settings.seed),
        console=console,
    )
    judge_shards = _shards_of(sets, JudgeSet, "judged", settings)
    if settings.verifier is not None:  # it also judges the generator's solutions
        judge_shards += [
            Shard(shard.set, claims_of(shard.set, rows), settings.out, "judged", shard.index)
            for shard, rows in zip(solve_shards, solved, strict=True)
        ]
    judged = complete_shards(
        "Judging",
        judge_shards,
        read_fn=lambda shard: read_judged(shard, votes),
        open_fn=lambda: _load_weights(samplers["verifier"], settings),
        work_fn=lambda sampler, shard: judge_shard(sampler, shard, votes, temperature, num_samples, settings.seed),
        console=console,
    )
    results = []
    for eval_set in sets:
        rows, verifications = _rows_of(eval_set, solve_shards, solved), _rows_of(eval_set, judge_shards, judged)
        is_solved = isinstance(eval_set, SolveSet)
        results.append(
            solve_result(eval_set, rows, verifications, cost_basis(eval_set, samplers)) if is_solved else
            judge_result(eval_set, verifications)
        )
        if hosts.is_first():
            write_rows(settings.out, eval_set, rows, verifications)
    if hosts.is_first():
        write_tables(settings.out, _introduction(settings, results, samplers), results, console)
    return results


def _open(settings: Settings, console: Console) -> tuple[list[EvalSet], dict[str, CheckpointSampler]]:
    """The sets, and a sampler without weights for each role that has work. Every mistake is found here."""
    is_correct = load_grader("--grader", settings.grader or "")
    sets = open_sets(settings.sets, settings.checkpoint, settings.judge, settings.problems, settings.seed, is_correct)
    for kind in {eval_set.grade_kind for eval_set in sets if isinstance(eval_set, SolveSet)}:
        check_grader(kind)
    samplers = {
        role: open_verifier(name, settings.sampler(role), settings.scored) if role == "verifier" else
        open_checkpoint_sampler(role, name, settings.sampler(role)) for role, name in models_of(settings).items()
    }
    is_sampled = "verifier" not in samplers or samplers["verifier"].is_sampled
    require(is_sampled or settings.votes == 1, f"--votes={settings.votes}: {settings.judge} writes nothing and judges "
            "the same each time: leave --votes out")
    for note in grader_notes(settings, sets):
        console.log(note)
    check_prompt_lengths(sets, samplers, are_solutions_judged=settings.verifier is not None)
    console.log(f"machine: {describe_machine()}")
    for eval_set in sets:
        what = "problems to solve" if isinstance(eval_set, SolveSet) else "solutions to judge"
        graded = f", graded by {grader_name(eval_set)}" if eval_set.is_correct else ""
        console.log(f"{eval_set.name}: {len(eval_set.items)} {what}, from {eval_set.source}{graded}")
        if isinstance(eval_set, SolveSet) and eval_set.num_other:
            console.log(f"{eval_set.name}: {eval_set.num_other} further rows are left out, since they are of another "
                        "kind or repeat others")
    check_settings(settings)
    return sets, samplers


def grader_notes(settings: Settings, sets: Sequence[EvalSet]) -> list[str]:
    solved = [eval_set for eval_set in sets if isinstance(eval_set, SolveSet)]
    notes = [note for one in solved if one.problems for note in try_grader(one, one.problems[0][1])]
    left = ", ".join(one.name for one in (sets if settings.grader else solved) if not one.is_correct)
    if left and settings.grader:
        notes.append(f"--grader={settings.grader} is not used in {left}: the rows say what is right")
    elif left and kind_of(settings.checkpoint) == "workdir":
        if used := read_config(Path(settings.checkpoint).expanduser()).task.grader:
            notes.append(f"in training {used} decided what is right; here answers in {left} are compared with the gold "
                         f"answers: use --grader={used} to decide here as well")
    return notes


def check_prompt_lengths(
    sets: Iterable[EvalSet], samplers: dict[str, CheckpointSampler], are_solutions_judged: bool
) -> None:
    """Raises ValueError where no problem of a set fits the prompt of a role."""
    solving = ROLES if are_solutions_judged else ("generator",)
    for eval_set in sets:
        if isinstance(eval_set, SolveSet):
            roles, problems = solving, [problem for _, problem in eval_set.problems]
        else:
            roles, problems = ("verifier",), [claim.solution.problem for claim in eval_set.claims]
        for role in roles:
            limit = samplers[role].max_prompt
            if all(_num_tokens(role, samplers[role], problem) > limit for problem in problems):
                shortest = min(_num_tokens(role, samplers[role], problem) for problem in problems)
                flag = {"generator": "--max_prompt", "verifier": "--verifier_max_prompt"}[role]
                raise ValueError(f"{flag}={limit} is too short for every problem of {eval_set.name}: the shortest "
                                 f"makes a prompt of {shortest} tokens; raise it to at least that")


def cost_basis(solve_set: SolveSet, samplers: dict[str, CheckpointSampler]) -> CostBasis:
    generator, verifier = (samplers.get(role) for role in ROLES)
    prompt_tokens = {number: _num_tokens("generator", generator, problem) for number, problem in solve_set.problems}
    if verifier is None:
        return CostBasis(prompt_tokens, generator.source.model_config, None)
    return CostBasis(prompt_tokens, generator.source.model_config, verifier.source.model_config, verifier.is_sampled)


def _num_tokens(role: str, sampler: CheckpointSampler, problem: Problem) -> int:
    """Tokens of a problem's prompt, for a verifier with the shortest solution."""
    if role == "generator":
        return len(generator_prompt(sampler.template, sampler.tokenizer, problem))
    return len(verifier_prompt(sampler.template, sampler.tokenizer, problem, "", 1, _NO_LIMIT)[0])


def _shards_of(sets: Sequence[EvalSet], kind: type, stage: str, settings: Settings) -> list[Shard]:
    return [
        Shard(eval_set, eval_set.items[start : start + settings.shard], settings.out, stage, start // settings.shard)
        for eval_set in sets if isinstance(eval_set, kind)
        for start in range(0, len(eval_set.items), settings.shard)
    ]


def _load_weights(sampler: CheckpointSampler, settings: Settings) -> CheckpointSampler:
    sampler = sampler.with_weights()  # all settings are checked by now: they are saved
    save_settings(settings)
    return sampler


def _rows_of(eval_set: EvalSet, shards: Sequence[Shard], rows: Sequence[list]) -> list:
    return [row for shard, part in zip(shards, rows, strict=True) if shard.set is eval_set for row in part]


def _introduction(
    settings: Settings, results: Sequence[SetResult], samplers: Mapping[str, CheckpointSampler]
) -> str:
    given = [(one.name, getattr(settings, one.name)) for one in dataclasses.fields(Settings)
             if getattr(settings, one.name) != one.default and one.name not in ("sets", *MAY_CHANGE)]
    lines = [f"- {name}: {markdown_code(str(value))}" for name, value in given]
    for grader in dict.fromkeys(result.grader for result in results if result.grader):
        names = ", ".join(result.name for result in results if result.grader == grader)
        lines.append(f"- {markdown_code(grader)} decides what is right in {names}; these figures do not compare with "
                     "published ones")
    if settings.samples and not settings.skip_greedy:
        lines.append("- figures of verifier, format and lengths are of the greedy solutions; the samples have tables "
                     "for each number of samples")
    if settings.votes > 1:
        lines.append("- first wrong steps: f1 and accuracy are of the majority of the votes; all other figures of the "
                     "verifier count every vote")
    for role, name in models_of(settings).items():
        if chosen_by := samplers[role].chosen_by:
            lines.append(f"- the weights of the {role}, {markdown_code(name)}, were chosen by "
                         f"{markdown_code(chosen_by)}: figures of the same problems are probably too high")
    lines.append("- percent, with 95 % intervals of a bootstrap over problems; this evaluation chose nothing by "
                 "looking at these sets")
    return "\n".join(lines)


def process_config(checkpoint: str) -> ConfigDict:
    config = default_config().copy_and_resolve_references()
    config.generator.checkpoint = checkpoint
    return config


def check_settings(settings: Settings) -> None:
    """Raises ValueError where the output folder holds another evaluation, or its settings are missing. Writes nothing.

    The first process checks; all must call this.
    """
    hosts.in_first(lambda: _compare(settings.out / "settings.json", _comparable(settings)))


def save_settings(settings: Settings) -> None:
    """Write the settings into the output folder, unless they are there. See `check_settings`."""
    path = settings.out / "settings.json"

    def save() -> None:
        found = _comparable(settings)
        if path.exists():
            _compare(path, found)
        else:
            write_json_atomic(path, found)

    hosts.in_first(save)


def _compare(path: Path, new: dict) -> None:
    if not path.exists():
        require(not (path.parent / "parts").exists(),
                f"{path} is missing, and without it nobody can tell whether {path.parent / 'parts'} was made with "
                "these settings: put back a copy, or choose another --out")
        return
    if changed := differences(read_json_object(path, "choose another --out"), new):
        raise ValueError(f"{path.parent} holds another evaluation ({'; '.join(changed[:5])}): go on with the same "
                         "settings, or choose another --out")


def _comparable(settings: Settings) -> dict:
    fields = {name: value for name, value in dataclasses.asdict(settings).items() if name not in MAY_CHANGE}
    fields["sets"] = list(settings.sets)
    promptings = {role: prompting_of(name, role) for role, name in models_of(settings).items()}
    fields["scored"] |= any(own is not None and own.is_scored for own in promptings.values())
    # Evaluations begun before there was a choice go on. One --use_chat was of both models then.
    if not fields["scored"]:
        del fields["scored"]
    if not settings.verifier_use_chat and not (settings.verifier and settings.use_chat):
        del fields["verifier_use_chat"]
    # Longer training, other weights in the same place or an edited template make another model.
    for role, name in models_of(settings).items():
        step, fields[f"{role}_weights_digest"] = identify_weights(name, role)
        if step is not None:
            fields["checkpoint_step" if role == "generator" else "verifier_step"] = step
        template = template_of(promptings[role], settings.sampler(role))
        fields[f"{role}_template_digest"] = digest(load_template(role, template))
    return fields
