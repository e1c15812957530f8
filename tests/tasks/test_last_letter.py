"""The synthetic task: pure functions of an index, gold labels by hand, and teachers as imperfect as configured."""

import dataclasses
import re
import string
from collections import Counter

import pytest

from support.paths import ROOT
from tango_jax.cli.command_line import load_config
from tango_jax.config import default_config
from tango_jax.grading import grade, parse_solution, parse_verification
from tango_jax.method.load import load_method
from tango_jax.records import Problem
from tango_jax.tasks import last_letter
from tango_jax.tasks.example_rng import EASY_ERROR, SPLITS
from tango_jax.tasks.last_letter import LastLetterConfig, tokenizer_model
from tango_jax.tasks.registry import make_task, turn_sizes
from tango_jax.text.character_tokenizer import train_sentencepiece
from tango_jax.text.tokenizer import Tokenizer, load_sentencepiece

CONFIG = LastLetterConfig(words=(2, 4), letters=(3, 5), hard_error=0.8, easy_error=0.05, reading_error=0.6)
HARD = set("bdfhjlnpr")
STEP = r"<step>#(\d+) ends in ([a-z])</step>"
BLOCK = r"<step>#(\d+) reads ([a-z]), says ([a-z]) \\boxed\{(\w+)\}</step>"
EXAMPLES = 2000  # with 6000 words or more, 10 of 26 hard: 3 standard errors of a rate are below 0.03


def words_of(question: str) -> list[str]:
    assert re.fullmatch(r"[a-z]+#\d+( [a-z]+#\d+)*", question)
    assert re.findall(r"#(\d+)", question) == [str(k) for k in range(1, question.count("#") + 1)]
    return re.findall(r"[a-z]+", question)


def next_letter(letter: str) -> str:
    return string.ascii_lowercase[(string.ascii_lowercase.index(letter) + 1) % 26]


def test_splits_share_no_problem():
    # 3 to 5 random letters a word: two equal questions mean equal random streams, not chance.
    questions = [
        last_letter.problem(CONFIG, 0, split, index).question for split in SPLITS for index in range(50)
    ]
    assert len(set(questions)) == len(questions)


def test_problems_keep_to_their_ranges_and_reach_both_ends():
    problems = [last_letter.problem(CONFIG, 0, "rl", index) for index in range(300)]
    counts, lengths, letters = set(), set(), set()
    for problem in problems:
        words = words_of(problem.question)
        assert problem.answer == "".join(word[-1] for word in words)
        assert problem.size == len(words)
        counts.add(len(words))
        lengths |= {len(word) for word in words}
        letters |= set("".join(words))
    assert counts == {2, 3, 4}
    assert lengths == {3, 4, 5}
    assert letters == set(string.ascii_lowercase)
    assert problems[7].id == "last_letter/rl/7"


def test_make_task_gives_every_split_its_ranges():
    config = default_config()
    task = config.task
    task.sft_words, task.rl_words, task.test_words = (1, 1), (2, 2), (3, 3)
    task.sft_letters, task.rl_letters, task.test_letters = (4, 4), (5, 5), (6, 6)
    task.data_seed = 5
    made = make_task(config, {})
    assert made.sft_example("verifier", "heldout", 0).num_steps == 1
    for problem, words, letters in [
        (made.sft_example("generator", "train", 3).problem, 1, 4),
        (made.sft_example("verifier", "heldout", 3).problem, 1, 4),
        (made.train_problem(3), 2, 5),
        (made.test_problem(3), 3, 6),
        (made.pool_solution(3)[0], 3, 6),
    ]:
        assert [len(word) for word in words_of(problem.question)] == [letters] * words
    ranges = LastLetterConfig((2, 2), (5, 5), task.hard_error, EASY_ERROR, task.reading_error)
    measured = LastLetterConfig((3, 3), (6, 6), task.hard_error, EASY_ERROR, task.reading_error, claim_noise=0.0)
    assert made.pool_solution(3) == last_letter.mixed_solution(measured, 5, "pool", 3)[:2]
    assert made.train_problem(3) == last_letter.problem(ranges, 5, "rl", 3)
    train, heldout = (made.sft_example("generator", split, 0).problem.question for split in ("train", "heldout"))
    assert train != heldout


def test_the_verifier_and_a_curriculum_have_problems_of_their_own():
    config = default_config()
    config.task.rl_words, config.task.verifier_words, config.task.test_words = (6, 6), (2, 3), ()
    task = make_task(config, {})

    def sizes(name):
        return {task.stream(name)(index).size for index in range(60)}

    assert (sizes("train"), sizes("verifier"), sizes("curriculum")) == ({6}, {2, 3}, {2, 3, 4, 5, 6})
    assert {task.test_problem(index).size for index in range(9)} == {6}  # empty: as in training
    assert task.pool_solution(0)[0].size == 6
    config.task.verifier_words = ()
    task = make_task(config, {})
    assert sizes("verifier") == {6} and task.stream("curriculum") is None
    questions = [{task.stream(name)(index).question for index in range(60)} for name in ("train", "verifier")]
    assert not questions[0] & questions[1]


@pytest.mark.parametrize("arm, told", [
    ("tango", "generator turns 8, verifier turns 2 to 4"), ("grpo", "generator turns 8"),
    ("grpo_curriculum", "generator turns 2 to 8"), ("fixed_generator", "verifier turns 2 to 4"),
])
def test_sizes_are_of_the_problems_that_turns_draw(arm, told):
    config = load_config("tiny", [f"arm={arm}", "task.rl_words=(8,8)", "task.verifier_words=(2,4)"])
    draws = {role: rehearsal.draws for role, rehearsal in load_method(config, is_checked=False).rehearsals.items()}
    assert turn_sizes(config, draws) == f"words of a problem: {told}"
    assert make_task(config, {}).notes == ()
    config.task.name = "math"
    assert turn_sizes(config, draws) == ""


@pytest.mark.parametrize("role", ["generator", "verifier"])
def test_a_tokenizer_of_another_kind_is_asked_how_long_problems_are(role):
    config = default_config()
    config.generator.checkpoint = config.verifier.checkpoint = "a/b"
    config.generator.template = config.verifier.template = "last_letter"
    letters = Tokenizer(lambda text: list(text.encode()), tuple(bytes([byte]) for byte in range(256)), (), (0,))
    tokenizers = {"generator": letters, "verifier": letters}
    make_task(config, tokenizers)
    config[role].max_prompt = 80  # eight words of ten letters are 112 characters
    with pytest.raises(ValueError, match=r"task\.\w+_words=\(2, 8\), .* raise the limits or shorten the problems"):
        make_task(config, tokenizers)


def test_another_seed_trains_on_other_problems_and_is_measured_on_the_same():
    def texts(seed, data_seed):
        config = default_config()
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


@pytest.mark.parametrize("steps, labels", [
    (("#1 ends in t", "#2 ends in g"), (True, True)),
    (("#1 ends in u", "#2 ends in g"), (False, True)),  # wrong letter
    (("#1 ends in a", "#2 ends in d"), (False, False)),  # letters of the word, but not the last
    (("#1 ends in g", "#2 ends in t"), (False, False)),  # the other word's letter
    (("#2 ends in t", "#2 ends in g"), (False, True)),  # wrong number
    (("#2 ends in g", "#1 ends in t"), (False, False)),  # in the wrong order
    (("#1 ends in t",), (True,)),  # a step is missing
    (("#1 ends in t", "#2 ends in g", "#3 ends in l"), (True, True, False)),  # one too many
    (("#1 ends in t", "#2 ends in g", "#2 ends in g"), (True, True, False)),
    (("#1 ends in t.", " #2 ends in g"), (False, False)),  # anything before or behind
    (("#1 cat ends in t", "#2  ends in g"), (False, False)),
    (("#1 ends in tt", "#2 ends in"), (False, False)),
    (("", "t"), (False, False)),
    ((), ()),
])
def test_gold_labels(steps, labels):
    problem = Problem("p", "cat#1 dog#2", "tg", size=2)
    assert last_letter.gold_steps(problem, steps) == labels
    assert tuple(kind == "easy letter" for kind in last_letter.step_kinds(problem, steps)) == labels


def test_kinds_of_steps():
    problem = Problem("p", "cat#1 dog#2 bad#3", "tgd", size=3)
    assert last_letter.step_kinds(problem, ("#1 ends in t", "#2 ends in h", "#3 ends in d")) == (
        "easy letter", "next letter of the alphabet", "hard letter")
    assert last_letter.step_kinds(problem, ("#2 ends in t", "#2 ends in x", "d", "#4 ends in d")) == (
        "another number", "another letter", "another form", "another number")


def test_texts_are_as_written():
    config = LastLetterConfig((2, 2), (3, 3), 0.0, 0.0, 0.0)
    first, second = words_of(last_letter.problem(config, 0, "rl", 0).question)
    assert last_letter.problem(config, 0, "rl", 0).question == f"{first}#1 {second}#2"
    assert last_letter.solution_text(["t", "h"], [1, 1]) == (
        "<think><step>#1 ends in t</step><step>#2 ends in h</step></think><answer>\\boxed{th}</answer>"
    )
    assert last_letter.verification_text(["t", "g"], ["t", "h"], [1, 1]) == (
        "<step_verification><step>#1 reads t, says t \\boxed{CORRECT}</step>"
        "<step>#2 reads g, says h \\boxed{INCORRECT}</step></step_verification>"
        "<final_verification>\\boxed{INCORRECT}</final_verification>"
    )
    assert last_letter.verification_text(["u"], ["u"], [1]) == (
        "<step_verification><step>#1 reads u, says u \\boxed{CORRECT}</step></step_verification>"
        "<final_verification>\\boxed{CORRECT}</final_verification>"
    )


def test_generator_teacher_errs_as_configured():
    wrong = {True: [], False: []}
    for index in range(EXAMPLES):
        problem, solution = last_letter.generator_example(CONFIG, 0, "sft_generator", index)
        words = words_of(problem.question)
        steps = re.findall(STEP, solution)
        assert [int(k) for k, _ in steps] == list(range(1, len(words) + 1))
        for word, (_, letter) in zip(words, steps, strict=True):
            assert letter in (word[-1], next_letter(word[-1]))
            wrong[word[-1] in HARD].append(letter != word[-1])
    assert sum(wrong[True]) / len(wrong[True]) == pytest.approx(0.8, abs=0.03)
    assert sum(wrong[False]) / len(wrong[False]) == pytest.approx(0.05, abs=0.02)


def test_verifier_teacher_errs_as_configured():
    misread, wrong, share_without_errors = {True: [], False: []}, {True: [], False: []}, []
    config = LastLetterConfig((4, 4), (3, 3), 0.8, 0.0, 0.6)
    for index in range(EXAMPLES):
        problem, solution, verification = last_letter.verifier_example(config, 0, "sft_verifier", index)
        words = words_of(problem.question)
        claims = [letter for _, letter in re.findall(STEP, solution)]
        blocks = re.findall(BLOCK, verification)
        assert [(int(k), claim) for k, _, claim, _ in blocks] == list(enumerate(claims, 1))
        for word, (_, reading, claim, mark) in zip(words, blocks, strict=True):
            assert mark == ("CORRECT" if reading == claim else "INCORRECT")
            assert reading in (word[-1], next_letter(word[-1]))
            misread[word[-1] in HARD].append(reading != word[-1])
            wrong[word[-1] in HARD].append(claim != word[-1])
        share_without_errors.append(claims == [word[-1] for word in words])
    assert sum(misread[True]) / len(misread[True]) == pytest.approx(0.6, abs=0.03)
    assert sum(misread[False]) == sum(wrong[False]) == 0
    # Half of the solutions err on hard letters at a rate of U(0, 1), whatever the generator's teacher does: 1/4 in all.
    assert sum(wrong[True]) / len(wrong[True]) == pytest.approx(0.25, abs=0.03)
    # No error in 4 words: half of all, and of the others, with 9 of 26 letters hard, E[(1 - 9u / 26)^4]
    # = 26/9 * (1 - (17/26)^5) / 5 = 0.5088.
    assert sum(share_without_errors) / EXAMPLES == pytest.approx(0.5 + 0.5 * 0.5088, abs=0.035)


def test_claim_noise_replaces_claims_and_leaves_the_readings():
    config = LastLetterConfig((4, 4), (3, 3), 0.8, 0.0, 0.0, claim_noise=0.4)
    wrong, claims_seen = [], set()
    for index in range(EXAMPLES):
        problem, _, verification = last_letter.verifier_example(config, 0, "sft_verifier", index)
        blocks = re.findall(BLOCK, verification)
        for word, (_, reading, claim, _) in zip(words_of(problem.question), blocks, strict=True):
            assert reading == word[-1]
            if word[-1] not in HARD:
                wrong.append(claim != word[-1])
                claims_seen.add(claim)
    # A random letter is the right one once in 26.
    assert sum(wrong) / len(wrong) == pytest.approx(0.4 * 25 / 26, abs=0.03)
    assert len(claims_seen) == 26


def test_teachers_solutions_parse_and_grade_by_their_letters():
    outcomes = set()
    for index in range(200):
        problem, text = last_letter.generator_example(CONFIG, 3, "sft_generator", index)
        parsed = parse_solution(text, 2)
        assert parsed.format_score == 1.0
        letters = [step[-1] for step in parsed.steps]
        assert parsed.answer == "".join(letters)
        labels = last_letter.gold_steps(problem, parsed.steps)
        assert labels == tuple(a == b for a, b in zip(letters, problem.answer, strict=True))
        assert grade(text, problem.answer, "string") == all(labels)
        outcomes.add(all(labels))
    assert outcomes == {True, False}


def test_teachers_verifications_parse_aligned_with_the_verdict_they_draw():
    verdicts = set()
    for index in range(200):
        problem, solution, text = last_letter.verifier_example(CONFIG, 3, "sft_verifier", index)
        steps = parse_solution(solution, 2).steps
        parsed = parse_verification(text, len(steps), 1.0)
        assert parsed.aligned and parsed.format_score == 1.0
        readings = re.findall(r"reads ([a-z])", text)
        assert parsed.judgements == tuple(reading == step[-1] for reading, step in zip(readings, steps, strict=True))
        assert parsed.verdict == ("CORRECT" if all(parsed.judgements) else "INCORRECT")
        verdicts.add(parsed.verdict)
    assert verdicts == {"CORRECT", "INCORRECT"}


@pytest.mark.parametrize("words, letters", [(1, 1), (1, 3), (2, 3), (8, 10), (9, 1), (12, 7), (99, 2)])
def test_longest_texts_are_as_long_as_computed(words, letters):
    tokenizer = load_sentencepiece(train_sentencepiece(last_letter.ALPHABET, last_letter.symbols(words)))
    config = LastLetterConfig((words, words), (letters, letters), 1.0, 1.0, 0.0)
    problem, solution, verification = last_letter.verifier_example(config, 0, "sft_verifier", 0)
    actual = {
        "generator prompt": len(tokenizer.encode_prompt(f"{problem.question}\n")),
        "generator response": len(tokenizer.encode_response(solution)),
        "verifier prompt": len(tokenizer.encode_prompt(f"{problem.question}\n{solution}\n{words}\n")),
        "verifier response": len(tokenizer.encode_response(verification)),
    }
    longest = last_letter.longest_texts(words, letters)
    # A number of steps with a single digit leaves the verifier's prompt one token short of the bound.
    assert longest == actual | {"verifier prompt": actual["verifier prompt"] + (words < 10)}


def test_no_text_of_a_split_is_longer_than_the_bound():
    tokenizer = load_sentencepiece(train_sentencepiece(last_letter.ALPHABET, last_letter.symbols(4)))
    longest = last_letter.longest_texts(CONFIG.words[1], CONFIG.letters[1])
    for index in range(200):
        problem, solution, verification = last_letter.verifier_example(CONFIG, 1, "sft_verifier", index)
        assert len(tokenizer.encode_prompt(f"{problem.question}\n")) <= longest["generator prompt"]
        assert len(tokenizer.encode_response(solution)) <= longest["generator response"]
        assert len(tokenizer.encode_response(verification)) <= longest["verifier response"]
        prompt = f"{problem.question}\n{solution}\n{problem.size}\n"
        assert len(tokenizer.encode_prompt(prompt)) <= longest["verifier prompt"]


def test_prompts_of_another_template_are_counted(tmp_path):
    """A template of one's own makes longer prompts than the material alone, which is what validation counts."""
    config = load_config(str(ROOT / "configs/tiny.py"))
    tokenizers = {role: load_sentencepiece(tokenizer_model(config.task)) for role in ("generator", "verifier")}
    make_task(config, tokenizers)
    template = tmp_path / "template.txt"
    template.write_text("{problem}\n" * 19)
    config.generator.template = str(template)
    with pytest.raises(ValueError, match=r"task\.sft_words=\(1, 2\), .* has at least \d+ tokens, .*max_prompt=104: "):
        make_task(config, tokenizers)


# ------------------------------------------------------------------------------- a number of steps that is free

FREE = LastLetterConfig((2, 8), (3, 3), hard_error=0.3, easy_error=0.1, reading_error=0.0, double_steps=0.5)


@pytest.mark.parametrize("steps, kinds", [
    (("#1 ends in t and #2 ends in g", "#3 ends in d"), ("two at once: easy letter", "hard letter")),
    (("#1 ends in t", "#2 ends in g and #3 ends in d"), ("easy letter", "two at once: hard letter")),
    (("#1 ends in u and #2 ends in g", "#3 ends in d"), ("two at once: next letter of the alphabet", "hard letter")),
    (("#1 ends in t and #2 ends in x", "#3 ends in d"), ("two at once: another letter", "hard letter")),
    (("#2 ends in g and #3 ends in d", "#3 ends in d"), ("two at once: another number", "hard letter")),
    (("#1 ends in t", "#1 ends in t", "#2 ends in g"), ("easy letter", "another number", "another number")),
    (("#1 ends in t", "g", "#3 ends in d"), ("easy letter", "another form", "hard letter")),
    (("#1 ends in t and #2 ends in g and #3 ends in d",), ("another form",)),
    (("#3 ends in d and #4 ends in t",), ("two at once: another number",)),
    ((" and #1 ends in t",), ("another form",)),
])
def test_a_step_of_two_words_goes_on_at_the_word_that_is_due(steps, kinds):
    problem = Problem("p", "cat#1 dog#2 bad#3", "tgd", size=3)
    assert last_letter.step_kinds(problem, steps) == kinds
    right = tuple(kind.endswith(("easy letter", "hard letter")) for kind in kinds)
    assert last_letter.gold_steps(problem, steps) == right


def test_teachers_mix_steps_of_one_and_two_words_and_err_twice_as_often_in_these():
    moves, wrong, sizes = [0, 0], [0, 0], Counter()
    for index in range(EXAMPLES):
        problem, text = last_letter.generator_example(FREE, 0, "sft_generator", index)
        steps = re.findall(r"<step>(.*?)</step>", text)
        named = [re.findall(r"#(\d+) ends in ([a-z])", step) for step in steps]
        assert [int(k) for step in named for k, _ in step] == list(range(1, problem.size + 1))
        assert problem.size / 2 <= len(steps) <= problem.size
        assert parse_solution(text, min_steps=1).answer == "".join(letter for step in named for _, letter in step)
        for step in named:
            for k, letter in step:
                moves[len(step) - 1] += 1
                wrong[len(step) - 1] += letter != words_of(problem.question)[int(k) - 1][-1]
        sizes[len(named[0])] += 1
    assert sizes[2] / sizes.total() == pytest.approx(0.5, abs=0.04)
    # 9 of 26 letters are hard: 0.3 * 9 / 26 + 0.1 * 17 / 26 = 0.169.
    assert wrong[0] / moves[0] == pytest.approx(0.169, abs=0.02)
    assert wrong[1] / moves[1] == pytest.approx(2 * 0.169, abs=0.02)


def test_every_step_of_two_words_is_judged_once_by_both_of_its_letters():
    seen = set()
    for index in range(200):
        problem, solution, text = last_letter.verifier_example(
            dataclasses.replace(FREE, easy_error=0.0), 0, "sft_verifier", index
        )
        steps = tuple(re.findall(r"<step>(.*?)</step>", solution))
        parsed = parse_verification(text, num_steps=len(steps))
        assert parsed.aligned and parsed.format_score == 1.0
        assert parsed.judgements == last_letter.gold_steps(problem, steps)
        seen |= {(" and " in step, right) for step, right in zip(steps, parsed.judgements, strict=True)}
    assert len(seen) == 4


def test_steps_of_two_words_fit_the_bounds_and_survive_the_tokenizer():
    tokenizer = load_sentencepiece(train_sentencepiece(last_letter.ALPHABET, last_letter.symbols(8, 0.5)))
    longest = last_letter.longest_texts(8, 3)
    for index in range(100):
        for prompt in ("second_try", "second_judgement", "informed"):
            problem, *texts = last_letter.further_example(FREE, 0, "sft_second_try", index, prompt)
            for text, most in zip(texts, ("generator", "verifier", ""), strict=True):
                ids = tokenizer.encode_response(text)
                assert tokenizer.decode(ids[:-1]) == text
                assert not most or len(ids) <= longest[f"{most} response"]


def test_the_number_of_steps_of_stage_ones_examples_is_counted():
    config = default_config()
    config.task.double_steps = 0.5
    made = make_task(config, {})
    examples = [made.sft_example("verifier", "train", index) for index in range(50)]
    assert all(example.num_steps == example.response.count("<step>") for example in examples)
    assert any(example.num_steps < example.problem.size for example in examples)
    assert made.further_example("second_try", "train", 1).num_steps == made.further_example(
        "second_try", "train", 1).solution.count("<step>")


def test_without_double_steps_texts_and_tokens_are_those_of_before():
    """A first token of the new kind would move the ids of all runs."""
    assert " and " not in last_letter.symbols(8)
    for index in range(100):
        _, text = last_letter.generator_example(CONFIG, 0, "sft_generator", index)
        assert " and " not in text
