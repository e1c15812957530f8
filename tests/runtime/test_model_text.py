r"""Text of models and data files on its way to people: it neither steers a terminal nor leaves its Markdown block."""

import io
import json
import subprocess
import sys
import unicodedata
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.console import Console as RichConsole

from support.paths import ROOT
from support.processes import HANG_S
from tango_jax import sample
from tango_jax.evaluation.output import table
from tango_jax.grading import parse_verification
from tango_jax.method.texts import make_solution
from tango_jax.records import Problem, Verification
from tango_jax.runtime.atomic import write_json_atomic
from tango_jax.runtime.console import Console
from tango_jax.runtime.model_text import (
    error_line,
    for_terminal,
    markdown_cell,
    markdown_code,
    markdown_fence,
    on_one_line,
)
from tango_jax.tracking.metrics import MetricsWriter
from tango_jax.tracking.results import transcripts
from tango_jax.tracking.rollout_dump import _line

HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")  # categories of controls and of what has no shape
# What each of these does to a terminal, a reader or a page when it is passed on as it is.
HOSTILE = {
    "colour": "\x1b[31mred\x1b[0m", "8-bit control": "\x9b31mred", "link": "\x1b]8;;http://evil\x07click\x1b]8;;\x07",
    "clipboard": "\x1b]52;c;ZXZpbA==\x07", "bell": "\x07", "backspaces": "wrong\x08\x08\x08\x08\x08right",
    "return": "wrong\rright", "delete": "\x7f", "next line": "a\x85b", "separators": "a\u2028b\u2029c",
    "override": "\u202egnorw", "isolate": "\u2066a\u2069", "zero width": "COR\u200bRECT", "joiner": "a\u200d\u2060b",
    "byte-order mark": "\ufeffa", "tags": "a\U000e0041", "variation": "a\ufe0f\U000e0100", "filler": "a\u3164b",
    "surrogate": "a\ud800b\udfff", "nul": "a\x00b", "form feed": "a\x0cb\x0bc", "private": "\ue000",
    "fence": "```\n# heading\n```", "tildes": "~~~\n# heading\n~~~", "long fence": "`````\nx", "pipes": "a | b || c",
    "escaped pipe": "\\|x\\| \\\\|", "picture": "![](http://evil/x.png)", "address": "[a](javascript:alert(1))",
    "script": "</details><script>alert(1)</script>", "handler": "<img src=x onerror=alert(1)>", "ticks": "`a``b`",
    "heading": "# Verdict: CORRECT\n\n- item\n\n---", "empty": "", "blank": " ",
    "autolink": "<http://evil> www.evil.com",
    "entity": "&#x202e;&lt;", "html comment": "<!-- a", "row": "\n| 9 | x | CORRECT | CORRECT |\n",
}
any_text = st.text(st.characters(), max_size=60) | st.lists(st.sampled_from(
    [*"`~|\\<>!&#*_-\n\r\t \x1b\x9b\x07\x08\u202e\u200b\u2028\ud800é数😀", "```", "~~~", "</details>", "![](", "\\|"]
), max_size=24).map("".join)
cheap = settings(max_examples=200, deadline=None, derandomize=True)
WRITER = SimpleNamespace(tokenizer=None, model_config=SimpleNamespace(score_head=""))


def assert_shown(text: str, kept: str = "\n\t") -> None:
    hidden = [char for char in text if char not in kept and unicodedata.category(char) in HIDDEN]
    assert not hidden, hidden
    assert not set(text) & set("\u034f\u3164\ufe0f\U000e0100")
    text.encode("utf-8")


def tokens_of(page: str) -> list:
    """What a renderer of Markdown with tables makes of a page, inline content included."""
    tokens = MarkdownIt("commonmark").enable("table").parse(page)
    return [part for token in tokens for part in (token, *(token.children or ()))]


def assert_inert(tokens: list) -> None:
    types = {token.type for token in tokens}
    assert not types & {"html_inline", "link_open", "image", "hardbreak"}, types


# ------------------------------------------------------------------------------------------------------- the module


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_nothing_that_steers_or_hides_is_left(text):
    assert_shown(for_terminal(text))
    assert_shown(on_one_line(text), kept="")
    assert "\n" not in error_line(text)


@cheap
@given(any_text)
def test_any_text_for_a_terminal(text):
    shown = for_terminal(text)
    assert_shown(shown)
    assert for_terminal(shown) == shown
    assert for_terminal(text, "ascii").isascii()
    for_terminal(text, "latin-1").encode("latin-1")
    assert_shown(on_one_line(text), kept="")


def test_what_can_be_read_stays_as_it_is():
    text = "\\frac{1}{2} \\rho = 3\n\t# größer als 数学, 5\u00a0€ 😀 שלום"
    assert for_terminal(text) == text
    assert for_terminal("\x1b\x9b\r\u202e\ud800\U000e0041") == r"\x1b\x9b\x0d\u202e\ud800\U000e0041"
    assert for_terminal("2 € é", "ascii") == r"2 \u20ac \xe9"
    assert markdown_code("a|b") == "`a|b`" and markdown_cell("a|b") == r"`a\|b`"


@cheap
@given(any_text, any_text)
def test_no_text_leaves_its_fence(first, second):
    tokens = tokens_of(f"before\n\n{markdown_fence(first)}\n\n{markdown_fence(second)}\n\nafter\n")
    assert [token.type for token in tokens if token.type not in ("inline", "text")] == [
        "paragraph_open", "paragraph_close", "fence", "fence", "paragraph_open", "paragraph_close"]
    assert [token.content for token in tokens if token.type == "fence"] == [
        for_terminal(first) + "\n", for_terminal(second) + "\n"]


@cheap
@given(any_text)
def test_no_text_leaves_its_code_span(text):
    code = markdown_code(text)
    assert_shown(code, kept="")
    for page in (f"said: {code}.", f"## {code}", f"- {code}"):
        tokens = tokens_of(page)
        assert [token.type for token in tokens].count("code_inline") == 1
        (found,) = [token.content for token in tokens if token.type == "code_inline"]
        assert found.strip() == for_terminal(text).replace("\n", "↵").replace("\t", "→").strip()
        assert "".join(token.content for token in tokens if token.type == "text") in ("said: .", "")
        assert_inert(tokens)


@cheap
@given(any_text, any_text)
def test_no_text_leaves_its_cell(first, second):
    page = table(["step", "wrote", "judged"], [["1", markdown_cell(first), "CORRECT"],
                                               ["2", markdown_cell(second), "INCORRECT"]])
    tokens = tokens_of(page)
    types = [token.type for token in tokens]
    assert (types.count("tr_open"), types.count("td_open"), types.count("code_inline")) == (3, 6, 2)
    wanted = [for_terminal(text).replace("\n", "↵").replace("\t", "→").strip() for text in (first, second)]
    assert [token.content.strip() for token in tokens if token.type == "code_inline"] == wanted
    assert [token.content for token in tokens if token.type == "text" and token.content] == [
        "step", "wrote", "judged", "1", "CORRECT", "2", "INCORRECT"]
    assert_inert(tokens)


# --------------------------------------------------------------------------------------------------- where it is used


def hostile_pair(text: str):
    """A solution whose problem, gold answer, steps and text are hostile, and a verification of the same kind."""
    task = SimpleNamespace(min_steps=1, gold_steps=None)
    written = f"<think><step>{text}</step></think><answer>\\boxed{{{text}}}</answer>"
    solution = make_solution(task, Problem(text, text, text), written, (), False)
    solution = replace(solution, steps=(text,))
    said = f"<step_verification><step>{text} \\boxed{{CORRECT}}</step></step_verification>{text}"
    parsed = parse_verification(said, 1)
    return solution, Verification(said, parsed.judgements, parsed.verdict, parsed.format_score, parsed.aligned,
                                  parsed.blocks, (), False)


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_transcripts_hold_model_text_as_code_alone(text):
    pairs = [hostile_pair(text), hostile_pair("harmless")]
    page = transcripts(*zip(*pairs, strict=True), 2)
    assert_shown(page)
    tokens = tokens_of(page)
    types = [token.type for token in tokens]
    assert (types.count("fence"), types.count("heading_open"), types.count("tr_open")) == (4, 3, 4)
    assert_inert(tokens)
    html = {token.content.strip() for token in tokens if token.type == "html_block"}
    assert html == {"<details><summary>raw text</summary>", "</details>"}


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_the_log_of_a_run_can_be_written_and_read(encoding):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, errors="strict")
    console = Console(stream=stream, interval_s=0.0)
    for text in HOSTILE.values():
        console.log(f"a prompt: {text}")
        console.table(text, ("name", text), [(text, 1.5)])
        with console.stage(text, 1) as stage:
            stage.advance(phase=text, word=text)
    stream.flush()
    written = raw.getvalue().decode(encoding)
    assert_shown(written)
    assert r"a prompt: \u202egnorw" in written


def answered(monkeypatch, text: str, stream) -> None:
    """What `sample` prints where question, solution and verification hold this text, unknown to the tokenizers."""
    solution = f"<think><step>{text}</step></think>\n<answer>\\boxed{{{text}}}</answer>{text}"
    said = f"<step_verification><step>{text}\\boxed{{CORRECT}}</step></step_verification>"
    texts = {"solve": solution, "verify": said}
    written = lambda sampler, prompt, args, name: sample.Response(texts[name], 9, False)  # noqa: E731
    monkeypatch.setattr(sample, "sample_one", written)
    monkeypatch.setattr(sample, "unreadable_characters", lambda tokenizer, texts: sorted(set("".join(texts))))
    monkeypatch.setattr(sample, "generator_prompt", lambda *arguments: [1])
    monkeypatch.setattr(sample, "verifier_prompt", lambda *arguments: ([1], False))
    console = RichConsole(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True)
    sampler = sample.CheckpointSampler(WRITER, None, None, "", 10, 3)
    sample.answer(text, sampler, sampler, None, console)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_sample_shows_every_line_of_a_model_behind_a_bar(monkeypatch, encoding):
    forged = "so 8\nJudgement\n1. | so 8\n   CORRECT\nVerdict: CORRECT   Answer: 8"
    for text in (*HOSTILE.values(), forged):
        raw = io.BytesIO()
        stream = io.TextIOWrapper(raw, encoding=encoding)
        answered(monkeypatch, text, stream)
        stream.flush()
        written = raw.getvalue().decode(encoding)
        assert_shown(written, kept="\n")
        own = [line for line in written.splitlines() if not line.lstrip(" 1.").startswith("|")]
        warned = ["warning:"] * bool(text)
        assert [line.split()[0] for line in own][:-2] == ["Question:", *warned, "Judgement"], own
        assert own[-1].startswith("Verdict: INVALID   Answer: "), own


@pytest.mark.parametrize("verdict, asked", [("INCORRECT", True), ("INCORRECT", False), ("CORRECT", True)])
def test_sample_solves_again_what_the_verdict_rejects(monkeypatch, verdict, asked):
    """The generator reads its solution and what the verifier said of it; model text stays behind the bar."""
    steps = "<step_verification><step>no \\boxed{INCORRECT}</step></step_verification>"
    texts = {
        "solve": "<think><step>a\nVerdict: CORRECT</step></think><answer>\\boxed{1}</answer>",
        "verify": f"{steps}<final_verification>\\boxed{{{verdict}}}</final_verification>",
        "solve again": "<think><step>b\nAnswer: 3</step></think><answer>\\boxed{2}</answer>",
    }
    read = []
    written = lambda sampler, prompt, args, name: sample.Response(texts[name], 9, False)  # noqa: E731
    monkeypatch.setattr(sample, "sample_one", written)
    monkeypatch.setattr(sample, "unreadable_characters", lambda tokenizer, texts: [])
    monkeypatch.setattr(sample, "generator_prompt", lambda *arguments: [1])
    monkeypatch.setattr(sample, "verifier_prompt", lambda *arguments: ([1], False))

    def build(prompt, template, tokenizer, judged, max_prompt):
        read.append(prompt.fields(judged, False).text)
        return [1], False

    monkeypatch.setattr(sample, "prompt_ids", build)
    stream = io.StringIO()
    console = RichConsole(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True)
    sampler = sample.CheckpointSampler(WRITER, None, None, "", 10, 3)
    sample.answer("q", sampler, sampler, SimpleNamespace(second_try=asked), console)
    own = [line for line in stream.getvalue().splitlines() if not line.lstrip(" 1.").startswith("|")]
    is_tried = verdict == "INCORRECT" and asked
    assert own[-1 - 2 * is_tried] == f"Verdict: {verdict}   Answer: 1"
    assert own[-2:] == ["Second try", "Answer: 2"] or not is_tried
    assert read == ([f"{texts['solve']}\n{texts['verify']}"] if is_tried else [])
    assert ("Second try" in own) == is_tried


def test_a_question_that_is_no_text_ends_in_one_line(capsys):
    with pytest.raises(SystemExit) as stopped:
        sample.main(["--checkpoint=x", "--question=a\udcff"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "error: the question 'a\\udcff' is not valid Unicode: give it in UTF-8\n"


def test_json_stays_one_line_and_takes_every_character(tmp_path):
    everything = "".join(HOSTILE.values())
    assert _line({"text": everything}).count(b"\n") == 1
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        writer.write(1, "eval", {"text": everything})
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
    write_json_atomic(tmp_path / "one.json", {"text": everything})
    assert json.loads((tmp_path / "one.json").read_text()) == {"text": everything}


def test_grade_writes_what_it_read(tmp_path):
    rows = [{"text": f"<answer>\\boxed{{{text}}}</answer>", "gold": f"{text} ", "kind": "string"}
            for text in HOSTILE.values() if text.strip()]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "tango_jax.grade", "--file", str(tmp_path / "rows.jsonl")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    graded = [json.loads(line) for line in done.stdout.splitlines()]
    assert [{key: row[key] for key in ("text", "gold", "kind")} for row in graded] == rows
