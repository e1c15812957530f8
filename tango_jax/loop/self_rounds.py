"""The rounds of a stage 1 without a teacher (self_stage_one.py): sample, keep, imitate, look."""

import dataclasses
import functools
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from tango_jax.grading import parse_verification
from tango_jax.loop.init_from import sft_directory
from tango_jax.loop.self_sampling import TEMPERATURE, Asked, PartSampler, Sampled, plainly, with_examples
from tango_jax.records import Problem, Solution
from tango_jax.rl.policy import Policy
from tango_jax.runtime import hosts
from tango_jax.runtime.atomic import write_atomically, write_json_atomic
from tango_jax.runtime.console import Console
from tango_jax.runtime.sealed import commit
from tango_jax.tasks.prompt_lengths import make_over
from tango_jax.tasks.self_text import (
    GATE,
    LOOKED_AT,
    SELF,
    Claim,
    agrees,
    as_fields,
    closed,
    has_layout,
    is_well_formed,
    keep_solutions,
    keep_verifications,
)
from tango_jax.tasks.tagged_examples import (
    TaggedExamples,
    TaggedRow,
    TaggedRows,
    make_tagged_examples,
    read_tagged_rows,
)
from tango_jax.tasks.task import Task
from tango_jax.tasks.worked_examples import examples_of, read_examples, with_known
from tango_jax.text.prompts import solution_of
from tango_jax.text.tokenizer import Tokenizer

LEAST_QUESTIONS = 2  # one to imitate, and one for the held-out loss
HELDOUT_SHARE = 10  # one kept row in ten is held out
CLOSING_TAG = {"generator": "answer", "verifier": "final_verification"}
ROUNDS = "rounds.json"
NO_STAGE_ONE = "the verifier has no stage 1, and turns with the format reward may teach it"
TOLD = {"generator": "", "verifier": ", which also say the grade of each solution and its damaged step,"}
HELP = "a larger model, easier problems or a file of tagged examples (task.examples) helps"


def as_solution(claim: Claim) -> Solution:
    return with_known(solution_of(claim.problem, claim.text, claim.num_steps), claim.is_right, claim.damaged)


class Pupil(NamedTuple):
    """A role that learns from its own samples."""

    policy: Policy
    config: ConfigDict
    task: Task
    tokenizers: Mapping[str, Tokenizer]
    home: Path  # WORKDIR/self/ROLE
    sampler: PartSampler
    parents: Sequence[Problem | Claim]
    weights_fn: Callable[[Any], dict]  # (parameters, or None: those of the start) -> what the sampler takes
    imitate_fn: Callable[[Task, Path, str], Any]  # (examples, folder as a workdir, title) -> parameters

    @property
    def role(self) -> str:
        return self.policy.role

    @property
    def records(self) -> list[Problem | Solution]:
        """What its prompts are about."""
        if self.role == "generator":
            return list(self.parents)
        return [as_solution(claim) for claim in self.parents]

    def kept(self, sampled: list[list[Sampled]]) -> tuple[list[TaggedRow], int]:
        """The samples to imitate or to hold out, and how many were left out because of their length."""
        most, tag, too_long = self.config[SELF].keep, CLOSING_TAG[self.role], []
        over_fn = make_over(self.config, self.tokenizers)

        def fits(row: TaggedRow) -> bool:
            if max(row.over(over_fn, (self.role,))) <= 0:
                return True
            too_long.append(row)
            return False

        if self.role == "generator":
            texts = [[(closed(one.text, tag), one.is_right) for one in own] for own in sampled]
            kept = keep_solutions(self.parents, texts, most, self.task.min_steps, self.is_strict(), fits)
        else:
            texts = [[closed(one.text, tag) for one in own] for own in sampled]
            kept = keep_verifications(self.parents, texts, most, fits)
        return kept, len(too_long)

    def well_formed(self, sampled: list[list[Sampled]], is_cut: bool) -> float:
        """The share of samples with a full format, and solutions with the layout; of the first parents alone where
        `sampled` ends with them. `is_cut`: up to the closing tag, whatever follows. Shares with and without the cut do
        not compare."""
        is_strict = self.is_strict()
        found = [self._is_well_formed(parent, one, is_cut, is_strict)
                 for parent, own in zip(self.parents, sampled, strict=False) for one in own]
        return sum(found) / len(found)

    def is_strict(self) -> bool:
        """Where all worked examples have the layout of the text contract, solutions must have it, too."""
        return all(has_layout(row.solution) for row in read_examples(self.config))

    def _is_well_formed(self, parent: Problem | Claim, one: Sampled, is_cut: bool, is_strict: bool) -> bool:
        text = closed(one.text, CLOSING_TAG[self.role]) if is_cut else one.text.strip()
        if self.role == "generator":
            is_formed = is_well_formed(text, self.task.min_steps, is_strict)
        else:
            is_formed = parse_verification(text, parent.num_steps).format_score == 1.0
        return is_formed and (is_cut or not one.is_truncated)


def learn(pupil: Pupil, console: Console, save_untrained_fn: Callable[[], None], workdir: Path) -> None:
    """Leaves the result of stage 1 in WORKDIR/sft/ROLE, or what an earlier run left there. All processes must call
    this. Raises ValueError: nothing of the generator's can be kept; and as `run_sft`."""
    share, role = pupil.well_formed(_looks(pupil, "plain_0", lambda: None), is_cut=False), pupil.role
    numbers, samples = pupil.config[SELF], len(pupil.parents) * pupil.config[SELF].samples
    seen = f"the {role}: {_percent(share)} of {_looked_at(pupil)} samples with the plain prompt are well formed"
    if share >= GATE:
        console.log(f"{seen}, at least {_percent(GATE)}: it needs no stage 1 and starts as it is")
        _write_rounds(pupil, [{"round": 0, "plain_share": share}], 0)
        save_untrained_fn()
        return
    if role == "verifier" and len(kinds := {claim.is_right for claim in pupil.parents}) == 1:
        kind, helps = ("right", "harder problems help") if True in kinds else ("wrong", HELP)
        console.log(f"warning: {seen}, and to learn from its own judgements it needs right and wrong solutions: of "
                    f"{numbers.samples} samples of the generator to each problem, all that are well formed and fit the "
                    f"verifier's prompt are {kind}: {NO_STAGE_ONE}; {helps}")
        _write_rounds(pupil, [{"round": 0, "plain_share": share}], 0)
        save_untrained_fn()
        return
    shown = examples_of(role, read_examples(pupil.config), pupil.task.min_steps)
    with_shown = with_examples(pupil.policy, shown, numbers.samples)
    looked = (2 * numbers.rounds - 1) * _looked_at(pupil)
    console.log(f"{seen}, less than {_percent(GATE)}: its stage 1 samples {numbers.samples} responses to each of "
                f"{len(pupil.parents)} prompts with worked examples{TOLD[role]}, and imitates what is right and well "
                f"formed, with the plain prompt, in {pupil.config[role].sft.steps} updates, for up to {numbers.rounds} "
                f"rounds. That is at most {numbers.rounds * samples + looked} samples of up to "
                f"{pupil.config[role].max_response} tokens, and {numbers.rounds * pupil.config[role].sft.steps} "
                "updates")
    result = _make_rounds(pupil, console, share, with_shown)
    if result:
        hosts.in_first(lambda: _move(pupil, result, workdir))
    else:
        save_untrained_fn()


def _make_rounds(pupil: Pupil, console: Console, share: float, with_shown: Asked) -> int:
    """Returns the round whose weights are the result; 0: nothing of the verifier's can be kept."""
    rounds, result, before = [{"round": 0, "plain_share": share}], 0, 0
    params_fn, shown_share = (lambda: None), None
    for number in range(1, pupil.config[SELF].rounds + 1):
        shows = shown_share is None or _shows_again(pupil, console, number, params_fn, shown_share)
        asked = with_shown if shows else plainly(pupil.policy, TEMPERATURE)
        folder = pupil.home / f"round_{number}"
        sampled = pupil.sampler.sample(folder, asked, pupil.records, pupil.config[SELF].samples,
                                       lambda params_fn=params_fn: pupil.weights_fn(params_fn()))
        (kept, too_long), formed = pupil.kept(sampled), pupil.well_formed(sampled, is_cut=True)
        shown_share = pupil.well_formed(sampled[:LOOKED_AT], is_cut=True) if shows else shown_share
        count = sum(map(len, sampled))
        row = {"round": number, "prompt": "examples" if shows else "plain", "samples": count,
               "well_formed_share": formed, "kept": len(kept), "kept_share": len(kept) / count}
        balanced = ", as many of right as of wrong solutions" * (pupil.role == "verifier")
        said = (f"the {pupil.role}'s round {number}: of {count} samples with {'worked examples' * shows}"
                f"{'the plain prompt' * (not shows)}, {_percent(formed)} are {_up_to_tag(pupil)} and {len(kept)} "
                f"are kept (right and well formed, at most self.keep={pupil.config[SELF].keep} of a prompt{balanced})"
                + f"; {too_long} are left out because of their length (max_response, sft.pack_length)" * (too_long > 0))
        if number == 1 and len({one.problem.question for one in kept}) < LEAST_QUESTIONS:
            console.log(_too_few(pupil, sampled, said))
            rounds.append(row)
            break
        if number > 1 and len(kept) <= before:
            console.log(f"{said}, not more than {before} in the round before: the rounds end")
            rounds.append(row)
            break
        params_fn = functools.cache(functools.partial(_imitate, pupil, number, kept))
        after = pupil.well_formed(_looks(pupil, f"plain_{number}", params_fn), is_cut=False)
        rounds.append(row | {"plain_share": after})
        console.log(f"{said}; after a stage 1 on these, {_percent(after)} of {_looked_at(pupil)} samples with the "
                    f"plain prompt are well formed (before: {_percent(share)})")
        if number > 1 and after <= share:
            console.log(f"the {pupil.role} starts from round {result}, as round {number} was no better")
            break
        result, share, before = number, after, len(kept)
        hosts.in_first(lambda earlier=range(1, number): _remove_weights(pupil, earlier))
        if share >= GATE:
            break
    if result and share < GATE:
        rest = "turns may teach the rest" if share else "turns teach only where a problem's samples differ in reward"
        console.log(f"warning: the {pupil.role} ends its stage 1 with {_percent(share)} well-formed samples, less than "
                    f"{_percent(GATE)}: {rest}; {HELP}")
    _write_rounds(pupil, rounds, result)
    return result


def _shows_again(
    pupil: Pupil, console: Console, number: int, params_fn: Callable[[], Any], shown_share: float
) -> bool:
    """Whether fewer samples with the plain prompt would be of use to a round than of those with worked examples, by
    samples as a round takes them: of the same parents, at its temperature and up to the closing tag."""
    tried = pupil.well_formed(_looks(pupil, f"tried_{number}", params_fn, TEMPERATURE), is_cut=True)
    shows = tried < shown_share
    console.log(f"the {pupil.role}'s round {number} samples with {'worked examples' if shows else 'the plain prompt'}: "
                f"{_percent(tried)} of {_looked_at(pupil)} samples with the plain prompt at temperature {TEMPERATURE} "
                f"are {_up_to_tag(pupil)}, and {_percent(shown_share)} of those with examples to the same prompts")
    return shows


def _looks(
    pupil: Pupil, name: str, params_fn: Callable[[], Any], temperature: float | None = None
) -> list[list[Sampled]]:
    """Samples with the plain prompt, by default at the temperature of the turns."""
    return pupil.sampler.sample(pupil.home / name, plainly(pupil.policy, temperature), pupil.records[: LOOKED_AT], 1,
                                lambda: pupil.weights_fn(params_fn()))


def _up_to_tag(pupil: Pupil) -> str:
    return f"well formed up to </{CLOSING_TAG[pupil.role]}>"


def _imitate(pupil: Pupil, number: int, kept: list[TaggedRow]) -> Any:
    """The parameters after imitating these rows, trained or read."""
    lines = "".join(json.dumps(as_fields(row), ensure_ascii=False) + "\n" for row in kept)
    hosts.in_first(lambda: write_atomically(pupil.home / f"kept_{number}.jsonl", lines))
    examples = {pupil.role: _examples(pupil, pupil.role, kept)}
    # One policy in both roles rehearses what its generator learned.
    if pupil.role == "verifier" and pupil.policy.is_shared and (rows := _taught(pupil.home.with_name("generator"))):
        examples["generator"] = _examples(pupil, "generator", rows)
    task = pupil.task._replace(
        sft_example=lambda role, part, index: examples[role].sft_example(role, part, index), sft_roles=tuple(examples),
        sft_fingerprint=hashlib.sha256(repr(kept).encode()).hexdigest(),
    )
    own = examples[pupil.role]
    title = (f"Stage 1: the {pupil.role} imitates {own.num_train} of its own samples, {own.num_heldout} held out "
             f"(round {number})")
    return pupil.imitate_fn(task, pupil.home / f"round_{number}", title)


def _examples(pupil: Pupil, role: str, rows: list[TaggedRow]) -> TaggedExamples:
    numbered = [row._replace(problem=dataclasses.replace(row.problem, id=f"{row.problem.id}/{place}"))
                for place, row in enumerate(rows)]
    heldout = max(1, len(rows) // HELDOUT_SHARE)
    over_fn = make_over(pupil.config, pupil.tokenizers)
    return make_tagged_examples(TaggedRows(numbered, []), heldout, pupil.config.task.data_seed, over_fn, (role,))


def _taught(home: Path) -> list[TaggedRow]:
    """The rows behind a role's result; empty: it needed none, or learned elsewhere."""
    path = home / ROUNDS
    result = json.loads(path.read_text(encoding="utf-8"))["result"] if path.exists() else 0
    return read_tagged_rows(str(home / f"kept_{result}.jsonl"), is_for_verifier=False) if result else []


def _too_few(pupil: Pupil, sampled: list[list[Sampled]], said: str) -> str:
    """The line on a verifier that has no stage 1. Raises ValueError: it is the generator."""
    if pupil.role == "generator":
        right = sum(one.is_right for own in sampled for one in own)
        raise ValueError(f"task.stage_one=self: {said}; {right} have a right answer: too few to imitate; {HELP}")
    found = {True: [], False: []}
    for claim, own in zip(pupil.parents, sampled, strict=True):
        found[claim.is_right] += [agrees(claim, closed(one.text, CLOSING_TAG["verifier"])) for one in own]
    counts = " and ".join(f"{sum(found[is_right])} of {len(found[is_right])} judgements of {name} solutions"
                          for is_right, name in ((True, "right"), (False, "wrong")))
    return (f"warning: {said}: {counts} are well formed and agree with what is known, and as many of each are "
            f"imitated, of {LEAST_QUESTIONS} problems at least: {NO_STAGE_ONE}; {HELP}")


def _remove_weights(pupil: Pupil, rounds: Iterable[int]) -> None:
    for number in rounds:
        shutil.rmtree(pupil.home / f"round_{number}" / "sft", ignore_errors=True)


def _move(pupil: Pupil, result: int, workdir: Path) -> None:
    """The result becomes the run's stage 1: only what is finished is found there."""
    _remove_weights(pupil, set(range(1, pupil.config[SELF].rounds + 1)) - {result})
    final = sft_directory(workdir, pupil.role)
    final.parent.mkdir(exist_ok=True)
    commit(sft_directory(pupil.home / f"round_{result}", pupil.role), final)


def _write_rounds(pupil: Pupil, rounds: list[dict], result: int) -> None:
    hosts.in_first(lambda: write_json_atomic(pupil.home / ROUNDS, {"result": result, "rounds": rounds}))


def _looked_at(pupil: Pupil) -> int:
    return min(LOOKED_AT, len(pupil.parents))


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
