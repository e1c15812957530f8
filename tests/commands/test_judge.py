"""`python -m tango_jax.judge`: given solutions are judged, with the probability of each mark."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support.evaluation_cases import CLAIM, SILENT, scripted_verifier, small_tokenizer, verification
from support.greedy_tokenizer import greedy_tokenizer
from support.paths import ROWS
from support.tiny_checkpoints import MODEL, tiny_params, write_tiny_folder
from tango_jax import evaluate
from tango_jax import judge as command
from tango_jax.data.rows import Row
from tango_jax.evaluation import judging
from tango_jax.evaluation.judging import JudgeSettings, judge_rows, mark_probabilities
from tango_jax.models import transformer
from tango_jax.models.attention import make_packed_attention
from tango_jax.sampling.checkpoint_sampler import CheckpointSamplerSettings
from tango_jax.text.templates import FIRST_ERROR

STEPS = {"problem": "What is 3 + 4?", "steps": ["3 + 4 = 7", "so 8"], "label": 1}
TAGGED = {"problem": "What is 5 - 2?", "solution": "<think><step>5 - 2 = 3</step></think><answer>\\boxed{3}</answer>"}
PLAIN = {"problem": "And 2 * 3?", "solution": "2 + 2 = 4\n4 + 2 = 6\n\nSo it is 6."}
SMALL = CheckpointSamplerSettings(CLAIM, max_prompt=256, max_new=256, rows=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny_folder(tmp_path_factory.mktemp("hf") / "model"))


def as_rows(*fields) -> list[Row]:
    return [Row(f"row {number}", f"rows/{number}", one) for number, one in enumerate(fields, 1)]


@pytest.fixture
def scripted(monkeypatch):
    """scripted(*texts): the verifier writes these, and has the tiny model's weights."""
    return lambda *texts: scripted_verifier(monkeypatch, *texts)


def softmax_after(text_ids: list[int]) -> np.ndarray:
    """The next token's distribution, by the trainer's forward pass over these tokens alone."""
    token_BT = jnp.array([text_ids])
    position_BT, attend_fn = jnp.arange(len(text_ids))[None], make_packed_attention(jnp.ones_like(token_BT))
    params = tiny_params()
    x_BTD = transformer.forward(MODEL, params, token_BT, position_BT, attend_fn)
    logits = transformer.logits_from_hidden(
        MODEL, params["final_norm"], transformer.head_matrix(MODEL, params), x_BTD[:, -1:])
    return np.asarray(jax.nn.softmax(logits))[0, 0]


def test_a_marks_probability_is_the_softmax_of_a_plain_forward_pass(folder, scripted):
    text, tokenizer = verification("INCORRECT", True, False), small_tokenizer()
    scripted(text)
    [result] = judge_rows(as_rows(STEPS), folder, JudgeSettings(sampler=SMALL), SILENT)
    [found] = result["verifications"]
    assert result["label"] == 1 and found["text"] == text and found["is_aligned"]
    assert found["judgements"] == [True, False] and found["verdict"] == "INCORRECT"

    prompt = tokenizer.encode_prompt(
        f"{STEPS['problem']}\n<think>\n<step>3 + 4 = 7</step>\n<step>so 8</step>\n</think>\n2\n")
    starts = [index + len("\\boxed{") for index in range(len(text)) if text.startswith("\\boxed{", index)]
    expected = []
    for start in starts:
        right, wrong = (tokenizer.encode_fn(f"{text[:start]}{word}}}") for word in ("CORRECT", "INCORRECT"))
        first = next(k for k in range(len(right)) if right[k] != wrong[k])
        assert tokenizer.encode_fn(text)[:first] == right[:first]
        probs = softmax_after([*prompt, *right[:first]])
        expected.append(probs[right[first]] / (probs[right[first]] + probs[wrong[first]]))
    assert len(expected) == 3 and np.ptp(expected) > 1e-4
    np.testing.assert_allclose([*found["p_steps"], found["p_verdict"]], expected, atol=2e-6)
    assert result["mean"] == {"p_steps": found["p_steps"], "p_verdict": found["p_verdict"],
                              "correct_steps": [1.0, 0.0], "correct_verdict": 0.0}


@pytest.mark.parametrize("spelled_by_character", [False, True])
def test_words_are_compared_at_the_first_token_that_differs(spelled_by_character):
    """Here the brace belongs to the token of one word: {IN against {. A text in other tokens is read in these."""
    tokenizer, text, asked = greedy_tokenizer("{IN", "{x", "CORRECT", "boxed{C"), verification("CORRECT", False), []
    own = greedy_tokenizer().encode_fn(text) if spelled_by_character else None
    tokens = [number + 4 for number in own] if own else tokenizer.encode_fn(text)
    assert tokenizer.decode(tokens) == text

    def logits_fn(rows, chosen):
        asked.extend(rows)
        return [np.tile(np.array(chosen, np.float32), (len(row), 1)) for row in rows]

    [(steps, verdict)] = mark_probabilities(tokenizer, logits_fn, [[90, 91]], [tokens])
    names = {token: tokenizer.decode([token]) for token in range(tokenizer.vocab_size)}
    # "\boxed{C" and "b", where the words differ: the logits are the numbers of the tokens.
    both = [next(token for token, name in names.items() if name == piece) for piece in ("boxed{C", "b")]
    expected = 1 / (1 + np.exp(float(both[1] - both[0])))
    assert steps == [pytest.approx(expected, rel=1e-12)] and verdict == pytest.approx(expected, rel=1e-12)
    assert [tokenizer.decode(row[2:])[: len("<step_verification>")] for row in asked] == [
        "<step_verification>"] * len(asked)


def test_a_product_of_many_steps_is_not_rounded_to_zero(folder, monkeypatch):
    monkeypatch.setattr(judging, "mark_probabilities",
                        lambda tokenizer, logits_fn, prompts, responses: [([0.35] * 14, 0.5)] * len(prompts))
    settings = JudgeSettings(scored=True, sampler=dataclasses.replace(SMALL, max_prompt=512, max_new=512))
    [result] = judge_rows(as_rows({**STEPS, "steps": ["so 8"] * 14}), folder, settings, SILENT)
    [found] = result["verifications"]
    assert found["p_steps"] == [0.35] * 14
    assert found["p_verdict"] == result["mean"]["p_verdict"] == pytest.approx(0.35**14, rel=1e-5)


def test_marks_that_are_not_there_have_no_probability(folder, scripted):
    scripted("<step_verification><step>fine</step><step>\\boxed{correct}</step></step_verification>")
    [result] = judge_rows(as_rows(STEPS), folder, JudgeSettings(sampler=SMALL), SILENT)
    [found] = result["verifications"]
    assert found["judgements"] == [None, True] and found["verdict"] == "INVALID" and not found["is_aligned"]
    assert found["p_steps"][0] is None and 0 < found["p_steps"][1] < 1 and found["p_verdict"] is None
    assert result["mean"] == {"p_steps": None, "p_verdict": None, "correct_steps": None, "correct_verdict": 0.0}
    assert judging.summary([result]) == (
        "solutions: 1, verifications: 1, of which 1 without a verdict (INVALID), 1 without one judgement for each "
        "step; this model does not write the marks: is it a verifier, and --template its own? --scored reads "
        "probabilities without them")


def test_samples_have_means(folder, scripted):
    scripted(verification("CORRECT", True, True), verification("INCORRECT", True, False), verification("CORRECT", True))
    [result] = judge_rows(as_rows(STEPS), folder, JudgeSettings(samples=12, sampler=SMALL), SILENT)
    found, mean = result["verifications"], result["mean"]
    aligned = [one for one in found if one["is_aligned"]]
    assert len(found) == 12 > len(aligned) > 0 and {one["verdict"] for one in found} == {"CORRECT", "INCORRECT"}
    assert mean["correct_verdict"] == round(sum(one["verdict"] == "CORRECT" for one in found) / 12, 6)
    assert mean["correct_steps"][0] == 1.0 > mean["correct_steps"][1]
    np.testing.assert_allclose(mean["p_steps"], np.mean([one["p_steps"] for one in aligned], axis=0), atol=1e-6)
    np.testing.assert_allclose(mean["p_verdict"], np.mean([one["p_verdict"] for one in found]), atol=1e-6)


def test_a_verifier_that_stops_at_the_first_error(folder, scripted):
    """Steps that it does not reach are not judged, and have a mean only where all verifications reach them."""
    scripted(verification("CORRECT", True, True), verification("INCORRECT", False))
    settings = JudgeSettings(samples=8, sampler=dataclasses.replace(SMALL, template=FIRST_ERROR, max_prompt=1024))
    [result] = judge_rows(as_rows(STEPS), folder, settings, SILENT)
    found, mean = result["verifications"], result["mean"]
    assert {tuple(one["judgements"]) for one in found} == {(True, True), (False, None)}
    assert all(one["is_aligned"] for one in found)
    stopped = [one for one in found if one["judgements"][0] is False]
    assert all(0 < one["p_steps"][0] < 1 and one["p_steps"][1] is None for one in stopped)
    np.testing.assert_allclose(mean["p_steps"][0], np.mean([one["p_steps"][0] for one in found]), atol=1e-6)
    assert mean["p_steps"][1] is None
    assert mean["correct_steps"] == [1 - len(stopped) / 8] * 2


def without_probabilities(results):
    return [[{name: value for name, value in one.items() if not name.startswith("p_")}
             for one in result["verifications"]] for result in results]


def probabilities(results):
    return [p for result in results for one in result["verifications"] for p in (*one["p_steps"], one["p_verdict"])]


def test_batches_change_nothing(folder, scripted):
    scripted(verification("CORRECT", True, True), verification("INCORRECT", True, False))
    rows = as_rows(STEPS, TAGGED, {**STEPS, "steps": ["so 9", "so 8"]}, {**TAGGED, "problem": "longer " * 30})
    whole = judge_rows(rows, folder, JudgeSettings(samples=3, sampler=SMALL), SILENT)
    for size, order in ((1, [0, 1, 2, 3]), (64, [3, 1, 0, 2])):
        settings = JudgeSettings(samples=3, sampler=dataclasses.replace(SMALL, rows=size))
        other = judge_rows([rows[index] for index in order], folder, settings, SILENT)
        other = [other[order.index(index)] for index in range(4)]
        assert without_probabilities(other) == without_probabilities(whole)
        np.testing.assert_allclose(probabilities(other), probabilities(whole), atol=2e-6)


def test_a_model_that_samples_is_the_same_in_any_batch(folder):
    rows = as_rows(STEPS, TAGGED, {**STEPS, "steps": ["so 9"]})
    texts = [[one["text"] for result in judge_rows(rows, folder, JudgeSettings(samples=2, sampler=settings), SILENT)
              for one in result["verifications"]]
             for settings in (dataclasses.replace(SMALL, max_new=8, rows=size) for size in (2, 64))]
    assert texts[0] == texts[1] and len(set(texts[0])) > 3


def test_resumed_equals_uninterrupted(folder, scripted, tmp_path):
    driver = scripted(verification("CORRECT", True, True), verification("INCORRECT", True, False))
    rows, out = as_rows(STEPS, TAGGED, {**STEPS, "id": "again"}, *({**STEPS, "problem": f"{k}?"} for k in range(4))), (
        tmp_path / "new" / "judged.jsonl")
    settings = JudgeSettings(samples=2, sampler=SMALL)
    results = judge_rows(rows, folder, settings, SILENT, out)
    whole = out.read_bytes()
    assert driver.calls == 12  # a repeated solution is judged once
    assert [json.loads(line) for line in whole.splitlines()] == results and results[2]["id"] == "again"
    assert judge_rows(rows, folder, settings, SILENT, out) == results and driver.calls == 12

    lines = whole.splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:2]) + lines[4][:40])  # killed while it wrote
    assert judge_rows(rows, folder, settings, SILENT, out) == results and driver.calls == 12 + 8
    assert out.read_bytes() == whole

    class Killed(Exception):
        pass

    sample, driver.sample = driver.sample, None
    def stop(weights, request):
        if driver.calls >= 24:
            raise Killed
        return sample(weights, request)

    driver.sample = stop
    out.unlink()
    with pytest.raises(Killed):
        judge_rows(rows, folder, settings, SILENT, out)
    assert len(out.read_bytes().splitlines()) == 2
    driver.sample = sample
    assert judge_rows(rows, folder, settings, SILENT, out) == results and out.read_bytes() == whole

    other = tmp_path / "other.jsonl"
    other.write_text('{"an": "unfinished line"')
    with pytest.raises(ValueError, match="other.jsonl, line 1, was not written by this verifier"):
        judge_rows(rows, folder, settings, SILENT, other)
    assert other.read_text() == '{"an": "unfinished line"'
    for changed in (dataclasses.replace(settings, seed=1), dataclasses.replace(settings, samples=3)):
        with pytest.raises(ValueError, match="line 1, was not written by this verifier with these settings"):
            judge_rows(rows, folder, changed, SILENT, out)


@pytest.mark.parametrize("template", ["plain", FIRST_ERROR])
def test_scored_rows_of_processbench_without_sampling(folder, tmp_path, capsys, template):
    """All marks are read, also of a verifier that would stop writing at the first error."""
    out = tmp_path / "judged.jsonl"
    flags = [f"--verifier={folder}", f"--file={ROWS / 'processbench.jsonl'}", "--scored",
             f"--template={template}"]
    assert command.main([*flags, f"--out={out}"]) == 0
    given = [json.loads(line) for line in (ROWS / "processbench.jsonl").read_text().splitlines()]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [{name: row[name] for name in one} for row, one in zip(rows, given, strict=True)] == given
    for row in rows:
        [found] = row["verifications"]
        assert len(found["p_steps"]) == len(row["steps"]) and all(0 < p < 1 for p in found["p_steps"])
        assert found["judgements"] == [p >= 0.5 for p in found["p_steps"]] and found["is_aligned"]
        assert found["verdict"] == ("CORRECT" if all(found["judgements"]) else "INCORRECT")
        assert found["p_verdict"] == pytest.approx(np.prod(found["p_steps"]), abs=1e-6)
    assert f"verifications: {len(rows)}, of which 0 without a verdict (INVALID), 0 with" in capsys.readouterr().out
    evaluated = tmp_path / "evaluated"
    evaluate.main([f"--verifier={folder}", f"--sets=processbench_math:{ROWS / 'processbench.jsonl'}", "--scored",
                   f"--verifier_template={template}", f"--out={evaluated}"])
    read = [json.loads(line) for line in (evaluated / "rows/processbench_math.jsonl").read_text().splitlines()]
    assert [[(one["verdict"], one["judgements"]) for one in row["verifications"]] for row in read] == [
        [(one["verdict"], one["judgements"]) for one in row["verifications"]] for row in rows]
    again = command.judge(given, folder, scored=True, template=template, rows=2)
    np.testing.assert_allclose(probabilities(again), probabilities(rows), atol=2e-6)


def test_plain_text_is_cut_as_asked(folder):
    for split, count in (("line", 3), ("blank_line", 2)):
        [result] = command.judge([PLAIN], folder, split=split, scored=True, template="plain")
        assert len(result["mean"]["p_steps"]) == count
    [result] = command.judge([TAGGED], folder, split="line", scored=True, template="plain")
    assert len(result["mean"]["p_steps"]) == 1  # tags say what a step is


def test_mistakes_end_in_one_line(folder, tmp_path, capsys):
    def file_of(*rows):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return f"--file={path}"

    taken = tmp_path / "taken.jsonl"
    taken.write_text('{"problem": "mine"}\n')
    short = ["--max_new=24", "--template=plain"]
    for arguments, message in [
        ([file_of(STEPS, {"steps": ["a"]})], "line 2: 'problem' is missing; keys found: steps; keys wanted: problem"),
        ([file_of(STEPS, {"problem": "a?"})], "line 2: 'solution' is missing"),
        ([file_of({**STEPS, "steps": []})], "line 1: 'steps' must be a non-empty list of strings"),
        ([file_of(TAGGED, PLAIN)], "line 2: 'solution' has no <step> tags: cut it into steps with --split=blank_line"),
        ([file_of(PLAIN), "--split=lines"], "--split='lines' is not one of blank_line, line (did you mean line?)"),
        ([file_of(TAGGED, STEPS), *short, "--max_prompt=40"], "line 1: with its 1 steps the prompt has "),
        ([file_of({**STEPS, "steps": ["a"] * 99}), "--scored", *short, "--max_prompt=1024"],
         "line 1: with marks for its 99 steps it has "),
        ([file_of(STEPS), f"--out={taken}"], "taken.jsonl, line 1, was not written by this verifier"),
        ([file_of(STEPS), "--samples=0"], "--samples=0 must lie between 1 and 1024"),
        ([file_of(STEPS), "--template=maths"], "verifier.template='maths' is neither"),
        ([file_of(STEPS), "--verifier=none.gguf"], "none.gguf does not exist"),
        ([f"--file={tmp_path}/none.jsonl"], "none.jsonl does not exist"),
    ]:
        with pytest.raises(SystemExit) as stopped:
            command.main([f"--verifier={folder}", f"--out={tmp_path}/out.jsonl", *arguments])
        assert stopped.value.code == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    assert taken.read_text() == '{"problem": "mine"}\n' and not (tmp_path / "out.jsonl").exists()
    with pytest.raises(ValueError, match="judge has no option sample"):
        command.judge([STEPS], folder, sample=2)
