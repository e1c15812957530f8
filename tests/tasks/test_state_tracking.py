"""State tracking: gold labels and states worked by hand, pure functions of an index, teachers as imperfect as set."""

import dataclasses
import itertools
import re
from collections import Counter

import numpy as np
import pytest

from support.paths import ROOT
from tango_jax.cli.command_line import load_config
from tango_jax.cli.validation import validate
from tango_jax.config import default_config
from tango_jax.grading import grade, parse_solution, parse_verification
from tango_jax.records import Problem
from tango_jax.tasks import state_tracking
from tango_jax.tasks.example_rng import EASY_ERROR, SPLITS
from tango_jax.tasks.registry import make_task, tokenizer_model
from tango_jax.tasks.state_tracking import StateTrackingConfig, apply_mistaken, apply_swap
from tango_jax.tasks.task import STREAMS
from tango_jax.text.tokenizer import Tokenizer, load_sentencepiece

CONFIG = StateTrackingConfig(swaps=(2, 5), hard_error=0.8, easy_error=0.05, reading_error=0.6)
HARD = {"1-4", "1-5", "2-5"}
NEIGHBOURS = {"1-2", "2-3", "3-4", "4-5"}
STEP = r"<step>#(\d+) (\d-\d) (\w+)</step>"
BLOCK = r"<step>#(\d+) (\d-\d) (\w+), says (\w+) \\boxed\{(\w+)\}</step>"
EXAMPLES = 2000  # with 8,000 swaps, 3 of 10 hard: 3 standard errors of a rate are below 0.03

# By hand: abcde -1-3-> cbade -2-5-> ceadb -1-4-> deacb.
QUESTION = "#1 1-3 #2 2-5 #3 1-4 start abcde"
PROBLEM = Problem("p", QUESTION, "deacb", size=3)


def swapped(state: str, swap: str) -> str:
    """The state with two letters exchanged, in another way than the task does it."""
    first, second = (state[int(position) - 1] for position in swap.split("-"))
    return state.translate(str.maketrans({first: second, second: first}))


def misread(state: str, swap: str) -> str:
    """The state with the later letter moved forward, in another way than the task does it."""
    letters, (first, second) = list(state), (int(position) - 1 for position in swap.split("-"))
    letters.insert(first, letters.pop(second))
    return "".join(letters)


def parts_of(question: str) -> tuple[list[str], str]:
    """The swaps and the start state, after checking that the question looks as it should."""
    assert re.fullmatch(r"(#\d+ [1-4]-[2-5] )+start [a-e]{5}", question)
    swaps = re.findall(r" (\d-\d) ", question)
    assert re.findall(r"#(\d+)", question) == [str(k) for k in range(1, len(swaps) + 1)]
    assert all(swap[0] < swap[2] for swap in swaps)
    return swaps, question[-5:]


# ---------------------------------------------------------------------------------------------------- problems


def test_splits_share_no_problem():
    # 8 swaps of 10 kinds and 120 start states: two equal questions mean equal random streams, not chance.
    config = StateTrackingConfig((8, 8), 0.8, 0.05, 0.6)
    questions = [
        state_tracking.problem(config, 0, split, index, stream).question
        for split in SPLITS for index in range(50) for stream in (0, 1)
    ]
    assert len(set(questions)) == len(questions)
    assert "rl_verifier" in SPLITS


def test_problems_keep_to_their_range_and_reach_both_ends():
    problems = [state_tracking.problem(CONFIG, 0, "rl", index) for index in range(600)]
    counts, starts, seen = set(), set(), Counter()
    for problem in problems:
        swaps, state = parts_of(problem.question)
        starts.add(state)
        for swap in swaps:
            state = swapped(state, swap)
        assert problem.answer == state
        assert problem.size == len(swaps)
        counts.add(len(swaps))
        seen.update(swaps)
    assert counts == {2, 3, 4, 5}
    assert len(starts) > 110  # of 120
    assert len(seen) == 10 and min(seen.values()) > 0.7 * sum(seen.values()) / 10
    assert problems[7].id == "state_tracking/rl/7"


@pytest.mark.parametrize("state, swap, right, mistaken", [
    ("bdaec", (1, 2), "dbaec", "dbaec"),  # of neighbours, both are the same
    ("bdaec", (4, 5), "bdace", "bdace"),
    ("bdaec", (1, 3), "adbec", "abdec"),
    ("bdaec", (2, 5), "bcaed", "bcdae"),
    ("bdaec", (1, 5), "cdaeb", "cbdae"),
    ("aabbc", (1, 4), "babac", "baabc"),  # what a model may write
])
def test_a_swap_and_the_mistake_that_is_made_in_it(state, swap, right, mistaken):
    assert apply_swap(state, swap) == right
    assert apply_mistaken(state, swap) == mistaken


def test_hard_swaps():
    assert {state_tracking.swap_text(swap) for swap in state_tracking.SWAPS if state_tracking.is_hard(swap)} == HARD
    assert len(set(state_tracking.SWAPS)) == 10


# -------------------------------------------------------------------------------------------------- gold labels


@pytest.mark.parametrize("steps, labels", [
    (("#1 1-3 cbade", "#2 2-5 ceadb", "#3 1-4 deacb"), (True, True, True)),
    # A wrong state in step 1 (the letter moved): what follows from it is valid.
    (("#1 1-3 cabde", "#2 2-5 cebda", "#3 1-4 debca"), (False, True, True)),
    # The same, and back to the true state: an invalid transition.
    (("#1 1-3 cabde", "#2 2-5 ceadb", "#3 1-4 deacb"), (False, False, True)),
    # Wrong in the middle and at the end.
    (("#1 1-3 cbade", "#2 2-5 cebad", "#3 1-4 aebcd"), (True, False, True)),
    (("#1 1-3 cbade", "#2 2-5 ceadb", "#3 1-4 dceab"), (True, True, False)),
    # A wrong number or another swap, with the right state for the step or for what it says.
    (("#2 1-3 cbade", "#2 2-5 ceadb"), (False, True)),
    (("#1 3-1 cbade",), (False,)),
    (("#1 1-2 bacde", "#2 2-5 becda"), (False, True)),
    (("#1 1-2 cbade",), (False,)),
    # The steps of 2 and 1 in the wrong order.
    (("#2 2-5 aecdb", "#1 1-3 ceadb"), (False, False)),
    # No step by its form: the one after it starts from the last state that was written.
    (("#1 1-3 cbad", "#2 2-5 aecdb"), (False, True)),
    (("#1 1-3 cbade", "nothing", "#3 1-4 dbace"), (True, False, True)),
    (("#1 1-3 cbade.",), (False,)),
    ((" #1 1-3 cbade",), (False,)),
    (("#1 1-3  cbade",), (False,)),
    (("#1 1-3 cbadf",), (False,)),
    # A state that is no permutation: valid from there on.
    (("#1 1-3 ccade", "#2 2-5 ceadc"), (False, True)),
    # One step too many, and too few.
    (("#1 1-3 cbade", "#2 2-5 ceadb", "#3 1-4 deacb", "#4 1-4 ceadb"), (*[True] * 3, False)),
    (("#1 1-3 cbade",), (True,)),
    (("",), (False,)),
    ((), ()),
])
def test_gold_labels(steps, labels):
    assert state_tracking.gold_steps(PROBLEM, steps) == labels
    assert tuple(kind.endswith(" swap") and kind != "another swap"
                 for kind in state_tracking.step_kinds(PROBLEM, steps)) == labels


def test_kinds_of_steps():
    assert state_tracking.step_kinds(PROBLEM, ("#1 1-3 cbade", "#2 2-5 ceadb", "#3 1-4 dceab")) == (
        "easy swap", "hard swap", "letters shifted, not swapped")
    assert state_tracking.step_kinds(PROBLEM, ("#1 1-2 bacde", "nothing", "#3 1-4 abcde")) == (
        "another swap", "another form", "another state")


def test_a_teachers_last_state_is_the_answer_where_all_steps_are_right():
    right = 0
    for index in range(500):
        problem, text = state_tracking.generator_example(CONFIG, 2, "sft_generator", index)
        steps = parse_solution(text, 2).steps
        if all(state_tracking.gold_steps(problem, steps)):
            assert steps[-1].endswith(problem.answer)
            right += 1
    assert 50 < right < 450


# -------------------------------------------------------------------------------------------- texts and teachers


def test_texts_are_as_written():
    assert state_tracking.question_parts(QUESTION) == ("abcde", [(1, 3), (2, 5), (1, 4)])
    assert state_tracking.true_states("abcde", [(1, 3), (2, 5), (1, 4)]) == ["cbade", "ceadb", "deacb"]
    swaps = [(1, 3), (2, 5)]
    assert state_tracking.solution_text(swaps, ["cbade", "ceadb"], [1, 1]) == (
        "<think><step>#1 1-3 cbade</step><step>#2 2-5 ceadb</step></think><answer>\\boxed{ceadb}</answer>"
    )
    assert state_tracking.verification_text(swaps, ["cbade", "ceadb"], ["cbade", "cebad"], [1, 1]) == (
        "<step_verification><step>#1 1-3 cbade, says cbade \\boxed{CORRECT}</step>"
        "<step>#2 2-5 ceadb, says cebad \\boxed{INCORRECT}</step></step_verification>"
        "<final_verification>\\boxed{INCORRECT}</final_verification>"
    )
    assert state_tracking.verification_text(swaps[:1], ["cbade"], ["cbade"], [1]) == (
        "<step_verification><step>#1 1-3 cbade, says cbade \\boxed{CORRECT}</step></step_verification>"
        "<final_verification>\\boxed{CORRECT}</final_verification>"
    )


class Counts:
    """How often a state is the mistaken one, by the kind of its swap; every state must be the right or that one."""

    def __init__(self):
        self.wrong = {"hard": [], "easy": [], "neighbours": []}

    def add(self, before: str, swap: str, after: str) -> None:
        right, mistaken = swapped(before, swap), misread(before, swap)
        assert after in (right, mistaken)
        self.wrong["hard" if swap in HARD else "neighbours" if swap in NEIGHBOURS else "easy"].append(after != right)

    def rate(self, kind: str) -> float:
        return sum(self.wrong[kind]) / len(self.wrong[kind])


def test_generator_teacher_errs_as_configured_and_carries_errors_on():
    counts = Counts()
    for index in range(EXAMPLES):
        problem, solution = state_tracking.generator_example(CONFIG, 0, "sft_generator", index)
        swaps, state = parts_of(problem.question)
        steps = re.findall(STEP, solution)
        assert [(int(k), swap) for k, swap, _ in steps] == list(enumerate(swaps, 1))
        for _, swap, written in steps:
            counts.add(state, swap, written)
            state = written
        assert f"<answer>\\boxed{{{state}}}</answer>" in solution
    assert counts.rate("hard") == pytest.approx(0.8, abs=0.03)
    assert counts.rate("easy") == pytest.approx(0.05, abs=0.02)
    assert counts.rate("neighbours") == 0


def test_verifier_teacher_errs_as_configured():
    readings, claims, share_without_errors = Counts(), Counts(), []
    config = StateTrackingConfig((4, 4), 0.8, 0.0, 0.6)
    for index in range(EXAMPLES):
        problem, solution, verification = state_tracking.verifier_example(config, 0, "sft_verifier", index)
        swaps, state = parts_of(problem.question)
        written = [claim for _, _, claim in re.findall(STEP, solution)]
        blocks = re.findall(BLOCK, verification)
        assert [(int(k), swap, claim) for k, swap, _, claim, _ in blocks] == list(
            zip(range(1, 5), swaps, written, strict=True)
        )
        for _, swap, reading, claim, mark in blocks:
            assert mark == ("CORRECT" if reading == claim else "INCORRECT")
            readings.add(state, swap, reading)  # from the state that is written, right or wrong
            claims.add(state, swap, claim)
            state = claim
        share_without_errors.append(all(state_tracking.gold_steps(problem, parse_solution(solution, 2).steps)))
    assert readings.rate("hard") == pytest.approx(0.6, abs=0.03)
    # Half of the solutions err on hard swaps at a rate of U(0, 1), whatever the generator's teacher does: 1/4 in all.
    assert claims.rate("hard") == pytest.approx(0.25, abs=0.03)
    assert readings.rate("easy") == claims.rate("easy") == 0
    # No error in 4 swaps: half of all, and of the others, with 3 of 10 swaps hard, E[(1 - 0.3 u)^4]
    # = (1 - 0.7^5) / 1.5 = 0.5546.
    assert sum(share_without_errors) / EXAMPLES == pytest.approx(0.5 + 0.5 * 0.5546, abs=0.035)


def test_claim_noise_replaces_claims_and_the_readings_follow_what_is_written():
    config = StateTrackingConfig((4, 4), 0.8, 0.0, 0.0, claim_noise=0.4)
    wrong, claims_seen = [], set()
    for index in range(EXAMPLES):
        problem, _, verification = state_tracking.verifier_example(config, 0, "sft_verifier", index)
        _, state = parts_of(problem.question)
        for _, swap, reading, claim, _ in re.findall(BLOCK, verification):
            assert reading == swapped(state, swap)
            if swap not in HARD:
                wrong.append(claim != reading)
                claims_seen.add(claim)
            state = claim
    # A random permutation is the right one once in 120.
    assert sum(wrong) / len(wrong) == pytest.approx(0.4 * 119 / 120, abs=0.03)
    assert len(claims_seen) == 120


def test_teachers_solutions_parse_and_grade_by_their_last_state():
    outcomes = set()
    for index in range(300):
        problem, text = state_tracking.generator_example(CONFIG, 3, "sft_generator", index)
        parsed = parse_solution(text, 2)
        assert parsed.format_score == 1.0
        assert parsed.answer == parsed.steps[-1][-5:]
        assert grade(text, problem.answer, "string") == (parsed.answer == problem.answer)
        if all(state_tracking.gold_steps(problem, parsed.steps)):
            assert parsed.answer == problem.answer
        outcomes.add(parsed.answer == problem.answer)
    assert outcomes == {True, False}


def test_teachers_verifications_parse_aligned_with_the_verdict_they_draw():
    verdicts = set()
    for index in range(200):
        _, solution, text = state_tracking.verifier_example(CONFIG, 3, "sft_verifier", index)
        steps = parse_solution(solution, 2).steps
        parsed = parse_verification(text, len(steps), 1.0)
        assert parsed.aligned and parsed.format_score == 1.0
        assert parsed.judgements == tuple(reading == claim for _, _, reading, claim, _ in re.findall(BLOCK, text))
        assert parsed.verdict == ("CORRECT" if all(parsed.judgements) else "INCORRECT")
        verdicts.add(parsed.verdict)
    assert verdicts == {"CORRECT", "INCORRECT"}


def test_a_verifier_without_mistakes_marks_the_gold_labels():
    config, seen = StateTrackingConfig((2, 6), 0.8, 0.0, 0.0, claim_noise=0.1), set()
    for index in range(200):
        problem, solution, text = state_tracking.verifier_example(config, 0, "sft_verifier", index)
        labels = state_tracking.gold_steps(problem, parse_solution(solution, 2).steps)
        assert parse_verification(text, len(labels), 1.0).judgements == labels
        seen |= set(labels)
    assert seen == {True, False}


@pytest.mark.parametrize("swaps", [6, 12])
def test_luck_is_rare(swaps):
    """Random answers are right once in 120; so are, nearly, solutions in which some step is wrong."""
    rng = np.random.default_rng(0)
    config = StateTrackingConfig((swaps, swaps), 0.6, 0.02, 0.6)
    random_answers, lucky = [], []
    for index in range(2 * EXAMPLES):
        problem, text = state_tracking.generator_example(config, 0, "sft_generator", index)
        random_answers.append("".join(rng.permutation(list("abcde"))) == problem.answer)
        parsed = parse_solution(text, 2)
        if not all(state_tracking.gold_steps(problem, parsed.steps)):
            lucky.append(parsed.answer == problem.answer)
    assert sum(random_answers) / len(random_answers) == pytest.approx(1 / 120, abs=0.005)
    assert len(lucky) > EXAMPLES
    assert sum(lucky) / len(lucky) < 0.02


# ------------------------------------------------------------------------------------------- tokens and lengths


@pytest.mark.parametrize("swaps", [1, 2, 9, 10, 16, 99, 100])
def test_longest_texts_are_as_long_as_computed(swaps):
    tokenizer = tokenizer_of(swaps)
    config = StateTrackingConfig((swaps, swaps), 1.0, 1.0, 0.0)
    problem, solution, verification = state_tracking.verifier_example(config, 0, "sft_verifier", 0)
    assert state_tracking.longest_texts(swaps) == {
        "generator prompt": len(tokenizer.encode_prompt(f"{problem.question}\n")),
        "generator response": len(tokenizer.encode_response(solution)),
        "verifier prompt": len(tokenizer.encode_prompt(f"{problem.question}\n{solution}\n{swaps}\n")),
        "verifier response": len(tokenizer.encode_response(verification)),
    }


def tokenizer_of(swaps: int) -> Tokenizer:
    config = default_config()
    config.task.name = "state_tracking"
    config.task.rl_swaps = (1, swaps)
    config.task.sft_swaps = config.task.test_swaps = (1, 1)
    return load_sentencepiece(tokenizer_model(config))


def test_no_text_of_a_split_is_longer_than_the_bound():
    tokenizer, longest = tokenizer_of(5), state_tracking.longest_texts(5)
    for index in range(200):
        problem, solution, verification = state_tracking.verifier_example(CONFIG, 1, "sft_verifier", index)
        assert len(tokenizer.encode_prompt(f"{problem.question}\n")) <= longest["generator prompt"]
        assert len(tokenizer.encode_response(solution)) <= longest["generator response"]
        assert len(tokenizer.encode_response(verification)) <= longest["verifier response"]
        prompt = f"{problem.question}\n{solution}\n{problem.size}\n"
        assert len(tokenizer.encode_prompt(prompt)) <= longest["verifier prompt"]


def test_texts_survive_the_tokenizer():
    """Whole, and with one token for each number, swap and letter of a state, wherever they are."""
    tokenizer = tokenizer_of(5)
    for index in range(100):
        problem, solution, verification = state_tracking.verifier_example(CONFIG, 1, "sft_verifier", index)
        for text in (f"{problem.question}\n", solution, verification, f"{problem.question}\n{solution}\n5\n"):
            ids = tokenizer.encode_response(text)
            assert tokenizer.decode(ids) == text
            # In the text, a state is five letters; "says", "start" and the tags are parts of symbols.
            states = "".join(re.findall(r"(?:\d-\d |start |says |\{)([a-e]{5})\b", text))
            tokens = [tokenizer.decode([token]) for token in ids]
            assert "".join(token for token in tokens if token in tuple("abcde")) == states
            assert [token for token in tokens if token.startswith("#")] == re.findall(r"#\d+", text)
            assert [token for token in tokens if "-" in token] == re.findall(r" \d-\d ", text)


def test_the_tokenizer_follows_the_largest_range_alone():
    config = default_config()
    config.task.name = "state_tracking"
    models = []
    for ranges in itertools.permutations([(2, 9), (2, 4), (3, 3)]):
        config.task.sft_swaps, config.task.rl_swaps, config.task.test_swaps = ranges
        models.append(tokenizer_model(config))
    assert len(set(models)) == 1
    assert load_sentencepiece(models[0]).vocab_size == tokenizer_of(9).vocab_size == tokenizer_of(8).vocab_size + 1


# ----------------------------------------------------------------------------------------------------- the task


def test_make_task_gives_every_split_its_range():
    config = default_config()
    task = config.task
    task.name, task.data_seed = "state_tracking", 5
    task.sft_swaps, task.rl_swaps, task.test_swaps = (1, 1), (2, 2), (3, 3)
    made = make_task(config, {})
    assert made.sft_example("verifier", "heldout", 0).num_steps == 1
    for problem, count in [
        (made.sft_example("generator", "train", 3).problem, 1),
        (made.sft_example("verifier", "heldout", 3).problem, 1),
        (made.train_problem(3), 2),
        (made.test_problem(3), 3),
        (made.pool_solution(3)[0], 3),
    ]:
        assert len(parts_of(problem.question)[0]) == problem.size == count
    # Noise is for stage 1 alone.
    rates = (task.hard_error, EASY_ERROR, task.reading_error)
    measured = StateTrackingConfig((3, 3), *rates, claim_noise=0.0)
    assert made.pool_solution(3) == state_tracking.mixed_solution(measured, 5, "pool", 3)[:2]
    imitated = StateTrackingConfig((1, 1), *rates, claim_noise=task.claim_noise)
    text = made.sft_example("verifier", "train", 3).response
    assert text == state_tracking.verifier_example(imitated, 5, "sft_verifier", 3)[2]
    train, heldout = (made.sft_example("generator", split, 0).problem.question for split in ("train", "heldout"))
    assert train != heldout


def test_the_verifier_and_a_curriculum_have_problems_of_their_own():
    config = default_config()
    config.task.name = "state_tracking"
    config.task.rl_swaps, config.task.verifier_swaps, config.task.test_swaps = (6, 6), (2, 3), ()
    task = make_task(config, {})
    sizes = {name: {task.stream(name)(index).size for index in range(60)} for name in STREAMS}
    assert sizes == {"train": {6}, "verifier": {2, 3}, "curriculum": {2, 3, 4, 5, 6}}
    assert {task.test_problem(index).size for index in range(9)} == {6}  # empty: as in training
    config.task.verifier_swaps = ()
    assert make_task(config, {}).stream("curriculum") is None


def test_another_seed_trains_on_other_problems_and_is_measured_on_the_same():
    def texts(seed, data_seed):
        config = default_config()
        config.task.name = "state_tracking"
        config.task.rl_swaps = config.task.test_swaps = config.task.sft_swaps = (8, 8)
        config.seed, config.task.data_seed = seed, data_seed
        task = make_task(config, {})
        measured = [str(make(index)) for make in (task.test_problem, task.pool_solution) for index in range(3)]
        example = task.sft_example("verifier", "train", 0)
        return [task.train_problem(index).question for index in range(3)], measured, example

    (train, *rest), (other_train, *other_rest) = texts(0, 0), texts(1, 0)
    assert not set(train) & set(other_train)
    assert rest == other_rest
    others = texts(0, 6)
    assert not set(train) & set(others[0]) and not set(rest[0]) & set(others[1]) and rest[1] != others[2]


def test_problems_are_counted_by_a_tokenizer_of_another_kind():
    config = default_config()
    config.task.name = "state_tracking"
    config.generator.template = config.verifier.template = "plain"
    config.generator.checkpoint = config.verifier.checkpoint = "a/b"
    letters = Tokenizer(lambda text: list(text.encode()), tuple(bytes([byte]) for byte in range(256)), (), (0,))
    tokenizers = {"generator": letters, "verifier": letters}
    make_task(config, tokenizers)
    config.generator.max_prompt = 67  # eight swaps are 8 * 7 + 6 + 5 + 1 = 68 characters
    with pytest.raises(ValueError, match=r"task\.sft_swaps=\(2, 8\): .* at least 68 tokens, more than .*=67: raise"):
        make_task(config, tokenizers)


# --------------------------------------------------------------------------------------------------- the config


@pytest.mark.parametrize("swaps", [2, 3, 8, 16])
def test_the_shipped_config_fits_its_largest_problems(swaps):
    config = load_config(f"{ROOT}/configs/state_tracking.py:{swaps}")
    validate(config)
    longest = state_tracking.longest_texts(swaps)
    # A solution that fills its limit can still be judged whole.
    spare = config.generator.max_response - longest["generator response"]
    assert spare > 0 and config.verifier.max_prompt >= longest["verifier prompt"] + spare
    assert config.verifier.max_response >= longest["verifier response"]
    assert config.task.test_swaps == (2, swaps)


@pytest.mark.parametrize("argument", ["x", "1", "-3", "2.5"])
def test_the_shipped_config_refuses_what_is_no_number_of_swaps(argument):
    with pytest.raises(ValueError, match=rf"state_tracking\.py, line \d+: '{argument}' is not the largest number"):
        load_config(f"{ROOT}/configs/state_tracking.py:{argument}")


@pytest.mark.parametrize("ranges", ["(1,1)", "(2,2)", "(8,8)", "(1,8)"])
def test_the_shipped_config_takes_any_range_up_to_its_largest(ranges):
    for split in ("sft", "rl", "test"):
        config = load_config(f"{ROOT}/configs/state_tracking.py", [f"task.{split}_swaps={ranges}"])
        validate(config)
        low, high = config.task[f"{split}_swaps"]
        assert ranges == f"({low},{high})"


@pytest.mark.parametrize("override, message", [
    ("task.rl_swaps=(0,4)", r"task\.rl_swaps=\(0, 4\): 0 must be at least 1"),
    ("task.test_swaps=(5,4)", r"task\.test_swaps=\(5, 4\) must be \(low, high\) with 1 <= low <= high"),
    ("task.sft_swaps=(5,)", r"task\.sft_swaps=\(5,\) must be \(low, high\)"),
    ("task.test_swaps=(2,9)", r"generator\.max_prompt=24 cannot hold the longest generator prompt of "
     r"task\.test_swaps=\(2, 9\): 26 tokens; raise the limit or shorten the problems"),
    ("verifier.max_response=159", r"verifier\.max_response=159 cannot hold the longest verifier response of "
     r"task\.sft_swaps=\(2, 8\): 160 tokens"),
    ("task.verifier_swaps=(9,9)", r"task\.verifier_swaps=\(9, 9\) begins above .* task\.rl_swaps=\(2, 8\): lower it"),
    ("arm=grpo_curriculum", r"arm=grpo_curriculum needs task\.verifier_swaps"),
    ("generator.sft.pack_length=107", r"generator\.sft\.pack_length=107 cannot hold the longest .*: 108 tokens"),
])
def test_a_mistaken_range_or_limit_is_refused_by_name(override, message):
    with pytest.raises(ValueError, match=message):
        validate(load_config(f"{ROOT}/configs/state_tracking.py", [override]))


# ------------------------------------------------------------------------------- a number of steps that is free

FREE = StateTrackingConfig((2, 8), hard_error=0.4, easy_error=0.1, reading_error=0.0, double_steps=0.5)


@pytest.mark.parametrize("steps, kinds", [
    (("#1 1-3 #2 2-5 ceadb", "#3 1-4 deacb"), ("two at once: hard swap", "hard swap")),
    (("#1 1-3 cbade", "#2 2-5 #3 1-4 deacb"), ("easy swap", "two at once: hard swap")),
    (("#1 1-3 #2 2-5 cebad", "#3 1-4 aebcd"), ("two at once: letters shifted, not swapped", "hard swap")),
    (("#1 1-3 #2 2-5 abcde", "#3 1-4 dbcae"), ("two at once: another state", "hard swap")),
    (("#1 1-3 #3 1-4 dbaec",), ("two at once: another swap",)),
    (("x", "#2 2-5 aecdb"), ("another form", "hard swap")),
    (("#3 1-4 dbcae",), ("another swap",)),
    (("#1 1-3 #2 2-5 #3 1-4 deacb",), ("another form",)),
    (("#1 1-3 cbade", "#2 2-5 ceadb", "#3 1-4 #4 1-2 edacb"),
     ("easy swap", "hard swap", "two at once: another swap")),
])
def test_a_step_of_two_swaps_goes_on_at_the_swap_that_is_due(steps, kinds):
    assert state_tracking.step_kinds(PROBLEM, steps) == kinds
    assert state_tracking.gold_steps(PROBLEM, steps) == tuple(kind.endswith(" swap") and "another" not in kind
                                                              for kind in kinds)


def test_teachers_of_both_roles_and_second_tries_know_steps_of_two_swaps():
    sizes = Counter()
    for index in range(300):
        problem, solution, text = state_tracking.verifier_example(
            dataclasses.replace(FREE, easy_error=0.0), 0, "sft_verifier", index
        )
        steps = parsed_steps(solution)
        parsed = parse_verification(text, num_steps=len(steps))
        assert parsed.aligned and parsed.judgements == state_tracking.gold_steps(problem, steps)
        sizes[steps[0].count("#")] += 1
        problem, _, _, again = state_tracking.further_example(FREE, 0, "sft_second_try", index, "second_try")
        swaps = [swap for step in parsed_steps(again) for swap in re.findall(r"#(\d+) (\d-\d)", step)]
        assert swaps == re.findall(r"#(\d+) (\d-\d)", problem.question)
    assert sizes[2] / sizes.total() == pytest.approx(0.5, abs=0.09) and set(sizes) == {1, 2}


def parsed_steps(solution: str) -> tuple[str, ...]:
    return tuple(re.findall(r"<step>(.*?)</step>", solution))
