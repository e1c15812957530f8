"""What answers cost that are chosen from k samples, by hand; what a verifier's probabilities choose; the figure."""

import csv
import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest

from support.evaluation_cases import (
    CLAIM,
    ROWS,
    SILENT,
    ScriptedDriver,
    evaluate,
    figures,
    judge,
    settings_of,
    small_tokenizer,
    solver,
    tagged,
    verification,
)
from support.reward_models import write_trl_folder
from support.tiny_checkpoints import write_tiny_folder
from tango_jax.data.rows import Row
from tango_jax.evaluate import main
from tango_jax.evaluation.cost import Cost, CostBasis, Costs, costs_of
from tango_jax.evaluation.judging import JudgeSettings, judge_rows, open_verifier
from tango_jax.evaluation.shards import JudgedRow, SolvedRow
from tango_jax.models.transformer import ModelConfig
from tango_jax.sampling.checkpoint_sampler import CheckpointSamplerSettings
from tango_jax.text.mark_rows import blank_marks
from tango_jax.text.marks import find_deciding_tokens

pytestmark = pytest.mark.usefixtures("closed_pool")
MODEL = ModelConfig(vocab_size=20, width=4, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=2, mlp_width=8)
# A token: 2 x 4 x 2 x (2 + 2) + 2 x 2 x 2 x 4 + 6 x 4 x 8 = 64 + 32 + 192. A pair: 4 x 2 x 2. Logits: 2 x 4 x 20.
TOKEN, PAIR, HEAD = 288, 16, 160
SMALL = CheckpointSamplerSettings(CLAIM, max_prompt=512, max_new=256, rows=4)


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


def solved(number, sample, tokens, steps=1, is_too_long=False) -> SolvedRow:
    return SolvedRow(number, sample, "", "", "", 0, "", None, -1, False, 1.0, steps, False, tokens, is_too_long, "")


def judged(row, vote, tokens, prompt, scored) -> JudgedRow:
    return JudgedRow(row.number, row.sample, vote, "", "", "CORRECT", (True,), True, 1.0, False, tokens, False, False,
                     prompt, scored, None, None)


@pytest.fixture
def rows():
    """Of the first problem two samples of 2 tokens, of the second one of 4 and one without steps, of the third none,
    since its prompt is too long. Two votes each, of 1 and 3 tokens."""
    samples = [solved(0, 0, 2), solved(0, 1, 2), solved(1, 0, 4, steps=3), solved(1, 1, 0, steps=0),
               *(solved(2, sample, 0, steps=0, is_too_long=True) for sample in range(2))]
    read = {(0, 0): (5, 7), (0, 1): (5, 7), (1, 0): (6, 9), (1, 1): (4, 0)}  # prompt, pass of the steps
    votes = {place: [judged(row, vote, tokens * (place in read), *read.get(place, (0, 0)))
                     for vote, tokens in enumerate((1, 3))]
             for row in samples if (place := (row.number, row.sample))}
    return samples, votes


def test_costs_by_hand(rows):
    """Prompts of 3 and 2 tokens, read once; all are means over the four samples, or two problems, that were
    asked."""
    found = costs_of(CostBasis({0: 3, 1: 2, 2: 99}, MODEL, MODEL), *rows)
    assert found.prompt == pytest.approx((0, (5 * TOKEN + (6 + 3) * PAIR) / 2))
    # Each token attends to the prompt and all before it: 2 x 3 + 3, and 4 x 2 + 10.
    assert found.sample == pytest.approx((8 / 4, (8 * TOKEN + (9 + 9 + 18) * PAIR + 8 * HEAD) / 4))
    # Four prompts are read once for two votes of 1 and 3 tokens: 4 x 5 + 1 + 6, 4 x 6 + 7, 4 x 4 + 7.
    pairs = (15 + 15 + 21 + 10) + (27 + 27 + 31 + 23)
    assert found.verification == pytest.approx((16 / 4, ((20 + 16) * TOKEN + pairs * PAIR + 16 * HEAD) / 4))
    # Read: 7, 7 and 9 tokens with 1, 1 and 3 marks.
    assert found.scored == pytest.approx((0, (23 * TOKEN + (28 + 28 + 45) * PAIR + 5 * HEAD) / 4))
    alone = costs_of(CostBasis({0: 3, 1: 2}, MODEL, None), rows[0], {})
    assert alone == (found.prompt, found.sample, None, None, 4, 2)


def test_a_reward_model_has_classes_for_all_that_it_reads(rows):
    prm = dataclasses.replace(MODEL, score_head="linear")
    found = costs_of(CostBasis({0: 3, 1: 2}, MODEL, prm, is_written=False), *rows)
    assert found.verification is None
    assert found.scored.flops == pytest.approx((23 * TOKEN + 101 * PAIR + 23 * 2 * 4 * 2) / 4)


COSTS = Costs(Cost(0, 10), Cost(5, 4), Cost(7, 6), Cost(0, 3))


@pytest.mark.parametrize("rule, k, expected", [
    ("pass", 4, (20, 26)), ("majority", 4, (20, 26)), ("best_of_by_verdict", 4, (48, 50)),
    ("vote_by_steps", 1, (12, 20)), ("vote_by_probability", 2, (24, 30)), ("best_of_by_scored", 2, (10, 24)),
])
def test_a_rule_pays_for_what_it_uses(rule, k, expected):
    """The prompt once, and k samples with their judgements."""
    assert COSTS.of(rule, k) == expected
    for measure, budget in zip(Cost._fields, expected, strict=True):
        assert COSTS.most_samples(rule, measure, budget, 8) == COSTS.most_samples(rule, measure, budget + 1, 8) == k
        assert COSTS.most_samples(rule, measure, budget - 1, 8) == k - 1
        assert COSTS.most_samples(rule, measure, 1e9, 8) == 8


def test_what_is_read_alone_costs_a_reading():
    read = COSTS._replace(verification=None)
    assert read.of("vote_by_verdict", 2) == read.of("vote_by_scored", 2) == (10, 24)


ANSWERS = {0: ["11", "11", "5", None], 1: ["5", "5", "16", "6"]}  # of gsm8k_short.jsonl; the gold answers are 11 and 16
WRITTEN = {0: {"11": 0.6, "5": 0.9, None: 0.2}, 1: {"5": 0.4, "16": 0.7, "6": 0.1}}
READ = {0: {"11": 0.7, "5": 0.5}, 1: {"5": 0.5, "16": 0.8, "6": 0.9}}  # each of three steps: 0.343, 0.125, 0.512, 0.729


@pytest.fixture
def two_problems(tmp_path) -> str:
    path = tmp_path / "two.jsonl"
    path.write_text("\n".join((ROWS / "gsm8k_short.jsonl").read_text().splitlines()[:2]))
    return f"gsm8k:{path}"


def scripted_pair(tokenizer, read=READ, steps=3, **more):
    """The verifier says CORRECT with the probabilities of WRITTEN, and of `read` where its marks are read."""
    text = verification("CORRECT", True)
    correct = {mark.correct for mark in find_deciding_tokens(
        tokenizer, *tokenizer.decode_with_ends(tokenizer.encode_response(text)))}
    first = (ROWS / "gsm8k_short.jsonl").read_text().splitlines()[0]

    def logits_fn(rows, chosen):
        found = []
        for row in rows:
            asked = tokenizer.decode(row)
            number = 0 if asked[:20] in first else 1
            answer = asked.partition("<answer>\\boxed{")[2].partition("}")[0] or None
            p = (read if "<step_verification>\n" in asked else WRITTEN)[number][answer]
            found.append(np.tile([np.log(p / (1 - p)) * (token in correct) for token in chosen], (len(row), 1)))
        return found

    def solve(number, sample, prompt):
        answer = ANSWERS[number][sample]
        return "no tags at all" if answer is None else tagged(answer, steps)

    def verify(number, sample, vote):
        return verification("CORRECT", *[True] * steps * (ANSWERS[number][sample] is not None))

    return solver(tokenizer, solve), judge(tokenizer, verify, samples=3, logits_fn=logits_fn, **more)


def test_probabilities_choose(tokenizer, two_problems, tmp_path, monkeypatch):
    """P of problem 0: 0.6 for the right answer twice, 0.9 for another, 0.2 for none. Of problem 1: 0.4 for a wrong one
    twice, 0.7 for the right one, 0.1 for another. The best of four is wrong and right, the sums right and wrong.

    Read in one pass: 0.343 twice, 0.125, nothing. 0.125 twice, 0.512, 0.729. The best of four is right and wrong, so
    are the sums. Of two: RR RA R- RA R- A- and AA AR AB AR AB RB.
    """
    settings = settings_of(tmp_path / "out", "--samples=4", "--skip_greedy", "--verifier=a/b", sets=two_problems)
    result = evaluate(monkeypatch, settings, *scripted_pair(tokenizer))["gsm8k"]
    found = figures(result)
    names = ("best_of_by_probability", "vote_by_probability", "best_of_by_scored", "vote_by_scored")
    assert [found[name, 4] for name in names] == [0.5] * 4
    assert found["vote_by_verdict", 4] == found["majority", 4] == 0.5
    assert [found[name, 2] for name in names] == pytest.approx(
        [(3 / 6 + 3 / 6) / 2, (3 / 6 + 3 / 6) / 2, (5 / 6 + 2 / 6) / 2, (5 / 6 + 2 / 6) / 2])
    page = (tmp_path / "out/tables.md").read_text()
    assert "| votes weighted by the verdict's probability | " in page and "FLOPs; its steps, read in one pass, " in page


def test_probabilities_of_many_steps_choose_also_when_they_are_read_again(
    tokenizer, two_problems, tmp_path, monkeypatch
):
    """0.34 ** 14 is 3e-7, and each wrong answer has less."""
    read = {0: {"11": 0.34, "5": 0.33}, 1: {"5": 0.3, "16": 0.34, "6": 0.33}}
    settings = settings_of(tmp_path / "out", "--samples=4", "--skip_greedy", "--verifier=a/b", sets=two_problems)
    found = figures(evaluate(monkeypatch, settings, *scripted_pair(tokenizer, read, 14))["gsm8k"])
    assert found["best_of_by_scored", 4] == found["vote_by_scored", 4] == 1.0 and found["majority", 4] == 0.5
    tables = (tmp_path / "out/tables.csv").read_bytes()
    evaluate(monkeypatch, settings, *scripted_pair(tokenizer, {}))  # all rows are stored
    assert (tmp_path / "out/tables.csv").read_bytes() == tables


def test_accuracy_at_equal_cost(tokenizer, two_problems, tmp_path, monkeypatch):
    """Each rule with the largest k whose cost is no more than that of the majority of k samples."""
    settings = settings_of(tmp_path / "out", "--samples=4", "--skip_greedy", "--verifier=a/b", sets=two_problems)
    result = evaluate(monkeypatch, settings, *scripted_pair(tokenizer))["gsm8k"]
    found, costs = figures(result), {(m.name, m.k): m.cost for m in result.metrics if m.cost}
    one, tokens = found["sample_tokens", 0], {"probability": found["verification_tokens", 0], "scored": 0.0}
    # A sample with its verification fits once into the tokens of two samples or more; one that is read is as cheap.
    for score, extra in tokens.items():
        k = int(4 * one / (one + extra) + 1e-9)
        assert costs[f"vote_by_{score}", 2].tokens == pytest.approx(2 * (one + extra))
        gain = found[f"vote_by_{score}", k] - found["majority", 4]
        assert found[f"vote_by_{score}_minus_majority_at_equal_tokens", k] == pytest.approx(gain)
    prompt, each = found["prompt_flops", 0], found["sample_flops", 0]
    budget, both = prompt + 4 * each, each + found["scored_flops", 0]
    assert costs["majority", 4] == pytest.approx((4 * one, budget))
    assert costs["best_of_by_scored", 1].flops == pytest.approx(prompt + both)
    k = int((budget - prompt) / both)
    assert 1 <= k < 4 and ("best_of_by_scored_minus_majority_at_equal_flops", k) in found
    _, table = (tmp_path / "out/tables.md").read_text().split("| accuracy for the FLOPs of maj@k |")
    [row] = [line for line in table.splitlines() if line.startswith("| best of k by P(CORRECT) read in one pass |")]
    assert f" | k = 4: {budget:.2e} | k = 4, minus majority |" in table.splitlines()[0]
    assert row.split(" | ")[3].endswith(f", k = {k}") and row.split(" | ")[1] == "–"


def test_a_verifier_that_is_read_alone_samples_nothing(tokenizer, two_problems, tmp_path, monkeypatch):
    generator, verifier = scripted_pair(tokenizer)
    settings = settings_of(tmp_path / "out", "--samples=4", "--skip_greedy", "--verifier=a/b", sets=two_problems)
    found = evaluate(monkeypatch, settings, generator, dataclasses.replace(verifier, reads_marks=True))["gsm8k"].metrics
    costs = {(metric.name, metric.k): metric.cost for metric in found if metric.cost}
    assert {name for name, _ in costs} == {"pass", "majority", *(
        f"{rule}_by_{score}" for rule in ("best_of", "vote") for score in ("verdict", "steps", "scored"))}
    assert costs["vote_by_verdict", 4] == costs["vote_by_scored", 4] != costs["majority", 4]
    assert costs["vote_by_scored", 4].tokens == costs["majority", 4].tokens
    values = {(metric.name, metric.k): metric.estimate.value for metric in found}
    assert values["vote_by_scored", 2] == pytest.approx(7 / 12) and ("verification_tokens", 0) not in values


@pytest.mark.parametrize("room, notes", [(0, ()), (-1, ("7 of 8 verifications were cut off at the length limit",))])
def test_marks_that_do_not_fit_are_cut_off(tokenizer, two_problems, tmp_path, monkeypatch, room, notes):
    """Of all but the solution that has no step."""
    generator, verifier = scripted_pair(tokenizer)
    limit = len(blank_marks(tokenizer, 3)) + room
    inner = SimpleNamespace(**vars(verifier.sampler) | {"config": SimpleNamespace(cache_buckets=(limit,))})
    settings = settings_of(tmp_path / "out", "--samples=4", "--skip_greedy", "--verifier=a/b", sets=two_problems)
    verifier = dataclasses.replace(verifier, reads_marks=True, sampler=inner)
    result = evaluate(monkeypatch, settings, generator, verifier)["gsm8k"]
    assert result.notes == notes
    assert figures(result)["verifier_rate_invalid", 0] == (1.0 if notes else 1 / 8)


@pytest.mark.parametrize("write", [write_tiny_folder, write_trl_folder])
def test_the_probabilities_are_those_of_judge(tokenizer, two_problems, tmp_path, monkeypatch, write):
    """With the weights of a model: of what it writes, and read in one pass."""
    folder, text = str(write(tmp_path / "model")), verification("INCORRECT", True, False, True)
    is_prm = write is write_trl_folder
    settings = dataclasses.replace(SMALL, template=None, max_new=0) if is_prm else SMALL
    opened = open_verifier(folder, settings)
    if not is_prm:
        driver = ScriptedDriver(opened.tokenizer, text)
        opened = dataclasses.replace(opened, sampler=dataclasses.replace(opened.sampler, driver=driver))
    flags = ("--samples=2", "--skip_greedy", f"--verifier={folder}")
    generator = solver(tokenizer, lambda number, sample, prompt: tagged(number).replace("some work", f"try {sample}"))
    evaluate(monkeypatch, settings_of(tmp_path / "out", *flags, sets=two_problems), generator, opened)
    lines = [json.loads(line) for line in (tmp_path / "out/rows/gsm8k.jsonl").read_text().splitlines()]
    asked = [Row(str(number), str(number), {"problem": row["question"], "solution": row["text"]})
             for number, row in enumerate(lines)]
    scored = judge_rows(asked, folder, JudgeSettings(scored=True, sampler=settings), SILENT)
    for row, alone in zip(lines, scored, strict=True):
        [found] = row["verifications"]
        assert found["p_scored"] == pytest.approx(alone["mean"]["p_verdict"], abs=2e-6) and 0 < found["p_scored"] < 1
        assert (found["p_verdict"] is None) == is_prm and found["num_scored"] > found["num_prompt"] >= 0
    assert len({row["verifications"][0]["p_scored"] for row in lines}) == 4
    if is_prm:
        return
    monkeypatch.setattr("tango_jax.evaluation.judging.open_verifier", lambda *arguments: opened)
    written = judge_rows(asked, folder, JudgeSettings(sampler=settings), SILENT)
    for row, alone in zip(lines, written, strict=True):
        assert row["verifications"][0]["p_verdict"] == pytest.approx(alone["mean"]["p_verdict"], abs=2e-6)


def test_the_command_writes_points_and_a_figure(tmp_path, monkeypatch):
    monkeypatch.setattr("tango_jax.cli.session.configure", lambda config: None)
    folder = str(write_tiny_folder(tmp_path / "model"))
    flags = [f"--checkpoint={folder}", f"--sets=gsm8k:{ROWS / 'gsm8k.jsonl'}", "--samples=3", "--problems=2",
             "--template=last_letter", "--max_new=8", "--max_prompt=250", "--rows=2"]
    main([*flags, f"--out={tmp_path / 'alone'}"])
    assert not (tmp_path / "alone/cost.png").exists()
    main([*flags, f"--verifier={folder}", "--verifier_template=last_letter", "--verifier_max_new=8",
          "--verifier_max_prompt=250", f"--out={tmp_path / 'out'}"])
    assert (tmp_path / "out/cost.png").read_bytes().startswith(b"\x89PNG")
    with open(tmp_path / "out/tables.csv") as file:
        points = [row for row in csv.DictReader(file) if row["flops"]]
    scores = ("verdict", "steps", "probability", "scored")
    assert {row["metric"] for row in points} == {
        "pass", "majority", *(f"{rule}_by_{score}" for rule in ("best_of", "vote") for score in scores)}
    assert all(0 <= float(row["value"]) <= 1 and float(row["tokens"]) > 0 and int(row["k"]) <= 3 for row in points)
    costs = [float(row["flops"]) for row in points if row["metric"] == "majority"]
    assert costs == sorted(set(costs)) and len(costs) == 3
