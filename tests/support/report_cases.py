"""Runs for the tests of the report: settings, metrics and rollouts as a run leaves them, of any size, in seconds.

Texts are made up; parsing, rewards and advantages are those of the project, and the files are written by its dump.
"""

import dataclasses
import json
import types
from pathlib import Path

import numpy as np

from tango_jax.config import default_config, flatten
from tango_jax.grading import parse_verification
from tango_jax.method.arms import ARMS, turns_of
from tango_jax.method.lesson import advantages_of
from tango_jax.method.texts import make_solution, with_parents
from tango_jax.method.turn import Turn
from tango_jax.records import Memory, Problem, Responses, Rollout, TurnResult, Verification
from tango_jax.rl.algorithms import algorithm_of
from tango_jax.rl.own_reward import OwnReward
from tango_jax.rl.packing import action_mask
from tango_jax.rl.schedule import Place
from tango_jax.runtime.atomic import write_json_atomic
from tango_jax.runtime.user_code import UserFunction
from tango_jax.tasks.task import Task
from tango_jax.tracking import alarms
from tango_jax.tracking.metrics import TURN_PHASES, MetricsWriter
from tango_jax.tracking.rollout_dump import RolloutDump

SYLLABLES = ("ka", "lo", "mi", "ru", "ten", "sa", "vor", "pi")
WORDS = [first + second + third for first in SYLLABLES for second in SYLLABLES for third in ("", "n", "ta")]
HOSTILE = "</script><img src=x onerror=alert(1)> & <b>Größe</b> \\frac{1}{2}\u2028"


def run_config(arm: str = "tango", seed: int = 0, groups: int = 4):
    config = default_config()
    config.arm, config.seed = arm, seed
    config.rl.prompts_per_step, config.rl.samples_per_prompt = groups, 4
    config.rollouts.every = 1
    return config


def ends_of(text: str) -> list[int]:
    """Tokens of four characters."""
    return [*range(4, len(text), 4), len(text)]


def words(rng, count: int) -> str:
    return " ".join(rng.choice(WORDS, count))


def make_one(rng, problem: Problem, length: int):
    """A solution whose steps are right with probability 0.8, now and then cut off."""
    gold = tuple(bool(label) for label in rng.random(rng.integers(1, 6)) < 0.8)
    steps = "".join(f"<step>{words(rng, length)}</step>\n" for _ in gold)
    text = f"<think>\n{steps}</think>\n<answer>\\boxed{{{len(gold)}}}</answer>"
    is_truncated = rng.random() < 0.06
    text = text[: len(text) * 2 // 3] if is_truncated else text
    task = types.SimpleNamespace(min_steps=1, gold_steps=lambda problem, steps: gold[: len(steps)])
    return make_solution(task, problem, text, ends_of(text), all(gold) and not is_truncated, is_truncated)


def hostile_solution():
    task = types.SimpleNamespace(min_steps=1, gold_steps=lambda problem, steps: (False,))
    # Spans count characters: one beyond the first 65,536 before them must not shift what is shown.
    text = f"\U0001f600\u202e<think><step>{HOSTILE}</step></think>"
    return make_solution(task, Problem("hostile", HOSTILE, HOSTILE), text, ends_of(text), False)


def verify_one(rng, solution, length: int) -> Verification:
    """A verification that errs on one step of six, and now and then forgets a step or the verdict."""
    labels = [bool(gold) != (rng.random() < 1 / 6) for gold in solution.gold_steps]
    if labels and rng.random() < 0.06:
        labels.pop()
    blocks = "".join(
        f"<step>{words(rng, length)} \\boxed{{{'CORRECT' if label else 'INCORRECT'}}}</step>" for label in labels
    )
    verdict = "CORRECT" if all(labels) else "INCORRECT"
    final = "" if rng.random() < 0.05 else f"<final_verification>\\boxed{{{verdict}}}</final_verification>"
    text = f"<step_verification>{blocks}</step_verification>{final}"
    parsed = parse_verification(text, len(solution.steps), solution.format_score)
    return Verification(text, parsed.judgements, parsed.verdict, parsed.format_score, parsed.aligned, parsed.blocks,
                        tuple(ends_of(text)), not final)


class MadeUp:
    """The work of a turn: solutions and verifications as above, `first` in place of the first solutions; log-probs of
    the sampler, most of them near 0."""

    def __init__(self, rng, length: int, first=()):
        self.rng, self.length, self.first = rng, length, first

    def respond(self, prompt, parents, samples: int, _) -> Responses:
        owners = [parent for parent in parents for _ in range(samples)]
        if prompt.role == "generator":
            records = [make_one(self.rng, owner, self.length) for owner in owners]
            records[: len(self.first)] = self.first
        else:
            records = [verify_one(self.rng, owner, self.length) for owner in owners]
        lengths = [len(record.token_ends) for record in records]
        logps = tuple(-self.rng.exponential(0.5, count) * (self.rng.random(count) < 0.4) for count in lengths)
        is_truncated_B, tokens = np.array([record.is_truncated for record in records]), tuple(map(np.zeros, lengths))
        rollout = Rollout(tokens, logps, is_truncated_B, max(lengths), sum(lengths))
        records = with_parents(records, owners)
        return Responses(prompt.role, parents, [], samples, rollout, records, {}, prompt.name)


def own_rewards_of(config, role: str) -> tuple[OwnReward, ...]:
    """What functions of the user's might say of each response, if the settings name any."""
    weights = config[role].reward_weights or (1.0,) * len(config[role].rewards)
    functions = [UserFunction(f"{role}.rewards", name, lambda one, *_: 0.01 * (len(one.text) % 90) - 0.3)
                 for name in config[role].rewards]
    return tuple(OwnReward(role, *pair) for pair in zip(functions, weights, strict=True))


def make_turn(config, rng, place: Place, length: int, credit_fn=None, first=()) -> TurnResult:
    """A turn of the config's arm; see `MadeUp`. `credit_fn` takes a lesson and the mask of its actions, and returns
    terms and a total that take the place of the lesson's."""
    config, role = config.copy_and_resolve_references(), place.role
    for one in ("generator", "verifier"):
        config[one].max_response = 16 * length + 100
    questions = [f"What is {words(rng, length)}?" for _ in range(config.rl.prompts_per_step)]

    def problem(p: int) -> Problem:
        return first[p].problem if p < len(first) else Problem(f"made/{place.index}/{p}", questions[p], str(p))

    task = Task("made up", "string", 1, problem, problem)
    t = Turn(config, task, place, Memory(label_counts=(3.0, 5.0)), algorithm_of(config[role].loss.algorithm),
             MadeUp(rng, length, first), own_rewards_of(config, role))
    lesson = turns_of(ARMS[config.arm], config.rl)[role](t)
    adv_BT = advantages_of(lesson, role, config)
    if credit_fn:
        terms, adv_BT = credit_fn(lesson, action_mask(config[role], lesson.responses.rollout))
        lesson = dataclasses.replace(lesson, terms=terms, step_rewards=())
    return TurnResult({}, {}, t.sampled, lesson, adv_BT, lesson.memory)


def kinds_of(problem: Problem, steps: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(("long step", "short step")[len(step) % 2] for step in steps)


def metrics_rows(index: int, phase: str, generator_step: int, rng) -> list[tuple[int, str, dict]]:
    """The turn's row, and an evaluation every fourth turn."""
    role = "generator" if phase == "generator" else "verifier"
    kl = 0.01 * index
    row = {f"{role}/entropy": 1 / (index + 2), f"{role}/kl": kl, f"{role}/kl_first": kl, f"{role}/length_mean": 50.0,
           f"{role}/logprob_gap_max": 1e-6, f"{role}/truncation_rate": 0.05, "time/sample_s": 0.5 + 0.1 * rng.random(),
           "time/update_s": 1.0, "time/turn_s": 1.6, "throughput/sampled_tokens_per_s": 1000.0,
           "memory/sample_host_gib": 1.0, "memory/update_host_gib": 1.0 + 0.01 * index}
    verdicts = {"verifier/reward/correctness": 0.6, "verifier/rate_correct": 0.5, "verifier/solutions_correct": 0.4}
    row |= {"generator/reward/outcome": 0.3} if role == "generator" else verdicts
    rows = [(index + 1, phase, {"generator_step": generator_step} | row)]
    if index % 4 == 0:
        score = 0.2 + 0.7 * index / (index + 10)
        rows.append((index + 1, "eval", {"generator_step": generator_step, "generator/accuracy": score,
                                         "verifier/pool/step_f1": score, "verifier/pool/outcome_f1": score,
                                         "time/evaluate_s": 2.0}))
    return rows


def write_run(
    folder: Path, config=None, turns: int = 10, length: int = 6, hostile: bool = False, evaluated: int = 0,
    credit_fn=None,
) -> Path:
    """A run of so many turns, every fourth of the verifier; with `hostile`, one question is full of markup.

    `evaluated` problems are solved and judged anew at every evaluation, that after every fourth turn.
    """
    config = config or run_config()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(flatten(config), default=list))
    dump = RolloutDump(folder / "rollouts", config, step_kinds_fn=kinds_of)
    rng, generator_step = np.random.default_rng(config.seed), 0
    held_out = [Problem(f"held_out/{p}", f"What is {WORDS[p]}?", str(p)) for p in range(evaluated)]
    rows, ringing = [], ()
    with MetricsWriter(folder / "metrics.jsonl", resume_at=0) as writer:
        for index in range(turns):
            role = "verifier" if index % 4 == 3 and config.arm != "grpo" else "generator"
            place, formula = Place(index, role, role, generator_step), algorithm_of(config[role].loss.algorithm).formula
            first = [hostile_solution()] if hostile and index == 0 else ()
            dump.write(place, make_turn(config, rng, place, length, credit_fn, first), formula)
            for step, phase, row in metrics_rows(index, role, generator_step, rng):
                if phase in TURN_PHASES:
                    rows.append({"step": step, "phase": phase} | row)
                    found = alarms.check(rows, ringing)
                    rows[-1] |= alarms.as_metrics(found, ringing)
                    row, ringing = row | alarms.as_metrics(found, ringing), [alarm.name for alarm in found]
                writer.write(step, phase, row)
            if index % 4 == 0 and held_out:
                solved = [make_one(rng, problem, length) for problem in held_out]
                judged = [verify_one(rng, solution, length) for solution in solved]
                dump.write_evaluation(index // 4, index + 1, generator_step, solved, judged, {})
            generator_step += role == "generator"
    write_json_atomic(folder / "summary.json", {"arm": config.arm})
    return folder
