"""Three methods of a user, each a function of a Turn: the verifier asked twice, a step rewritten, a debate."""

import dataclasses

import numpy as np

from tango_jax.method.arms import ARMS
from tango_jax.method.rewards import graded, step_rewards
from tango_jax.method.turn import joined
from tango_jax.records import Lesson, Rewards, problem_of
from tango_jax.rl.schedule import alpha_of
from tango_jax.text.prompts import Fields, Prompt


def solve_where_both_agree(t):
    """The verifier judges every solution twice. Only solutions on which both judgements agree are rewarded by steps."""
    solutions, reward = t.until_full(
        lambda problems: graded(t, t.sample("generator", problems, t.rl.samples_per_prompt))
    )
    first, second = t.sample("verifier", solutions, 2).by_number()
    agreed = [one.judgements if one.is_aligned and one.judgements == other.judgements else None
              for one, other in zip(first, second, strict=True)]
    steps, alpha = step_rewards(t, solutions, agreed), alpha_of(t.generator_step, t.rl, 0.0)
    terms = {"outcome": (1 - alpha, t.algorithm.outcome(reward, solutions)),
             "agreed steps": (alpha, t.algorithm.step(steps, solutions))}
    share = np.mean([label is not None for label in agreed])
    return Lesson(solutions, reward, terms, {"generator/agreed": share}, step_rewards=[steps])


def up_to_the_first_mistake(judged, is_plain):
    kept = judged.of.text.partition(f"<step>{judged.of.steps[judged.judgements.index(False)]}")[0]
    return Fields(lambda text: f"{problem_of(judged).question}\n{text}", kept)


REWRITE = Prompt("rewrite", "generator", up_to_the_first_mistake)


def with_the_step_rewritten(new) -> str:
    """The solution with the first step of the new one in the place of its first rejected step, and the new answer."""
    judged, (step, *_) = new.after, new.steps or ("",)
    text = judged.of.text.replace(judged.of.steps[judged.judgements.index(False)], step, 1)
    return text.partition("<answer>")[0] + "<answer>" + new.text.partition("<answer>")[2]


def solve_and_rewrite(t):
    """The generator solves, the verifier judges, the generator rewrites the first rejected step. Both are trained."""
    solutions = t.sample("generator", t.problems(), t.rl.samples_per_prompt)
    rejected = [one for one in t.sample("verifier", solutions) if one.is_aligned and False in one.judgements]
    new = t.sample("generator", rejected, prompt=REWRITE, at_most=len(solutions))
    report = t.grade([problem_of(one) for one in new], [with_the_step_rewritten(one) for one in new])
    both = joined([solutions, new], most_prompts=2 * len(solutions))
    right_B = np.array([*(one.is_correct for one in solutions), *report.correct], np.float32)
    metrics = {"generator/reward/outcome": right_B[: len(solutions)].mean(), "generator/rewritten": len(new)}
    reward = Rewards(right_B, metrics)
    return Lesson(both, reward, {"outcome": (1.0, t.algorithm.outcome(reward, both))})


def two_solutions(pair, is_plain):
    return Fields(problem_of(pair).question, "\n".join(solution.text for solution in pair), len(pair))


DEBATE = Prompt("debate", "verifier", two_solutions)


def judge_a_debate(t):
    """Two solutions of a problem are shown to the verifier. CORRECT says that the first is the better one."""
    solutions = t.sample("generator", t.problems("verifier"), 2)
    pairs = list(zip(*solutions.by_number(), strict=True))
    judged = t.sample("verifier", pairs, t.rl.samples_per_prompt, prompt=DEBATE)
    named = [dict(CORRECT=one, INCORRECT=other).get(judgement.verdict)
             for judgement, (one, other) in zip(judged, judged.owners, strict=True)]
    agrees_B = np.array([better is not None and better.is_correct == any(one.is_correct for one in pair)
                         for better, pair in zip(named, judged.owners, strict=True)], np.float32)
    reward = Rewards(agrees_B, {"verifier/reward/correctness": agrees_B.mean()})
    return Lesson(judged, reward, {"outcome": (1.0, t.algorithm.outcome(reward, judged))})


TANGO = ARMS["tango"]
agreed = dataclasses.replace(TANGO, label="agreed", turns=TANGO.turns | {"generator": solve_where_both_agree})
rewriting = dataclasses.replace(TANGO, label="rewriting", turns=TANGO.turns | {"generator": solve_and_rewrite})
debate = dataclasses.replace(TANGO, label="debate", turns=TANGO.turns | {"verifier": judge_a_debate})
