"""`python -m tango_jax.sample`: any checkpoint answers, another or the same one judges, mistakes end in one line."""

import argparse
import dataclasses
import io

import pytest
from rich.console import Console

from support.evaluation_cases import CLAIM, PROMPT, scripted, scripted_verifier, small_tokenizer, verification
from support.paths import ROOT
from support.reward_models import write_trl_folder
from support.tiny_checkpoints import save_run, write_tiny_folder, write_tiny_gguf
from tango_jax import sample
from tango_jax.cli.command_line import load_config
from tango_jax.evaluation import judging
from tango_jax.text.character_tokenizer import printable_model
from tango_jax.text.tokenizer import load_sentencepiece

SHORT = ["--template=last_letter", "--verifier_template=last_letter", "--max_new=24", "--max_prompt=128"]
SOLUTION = "<think>\n<step>3 + 4 = 7</step>\n<step>so 8</step>\n</think>\n<answer>\\boxed{8}</answer>"
VERIFICATION = (
    "<step_verification>\n<step>It adds. \\boxed{CORRECT}</step>\n<step>7 is not 8. \\boxed{INCORRECT}</step>\n"
    "</step_verification>\n<final_verification>\\boxed{INCORRECT}</final_verification>"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_folder(tmp_path_factory.mktemp("hf") / "model")


def test_a_gguf_answers_and_a_folder_judges(folder, tmp_path, capsys, monkeypatch):
    gguf = write_tiny_gguf(tmp_path / "model.gguf")
    monkeypatch.setattr("sys.stdin", io.StringIO("What is 3 + 4?\n\nAnd 5?\n"))
    assert sample.main([f"--checkpoint={gguf}", f"--verifier={folder}", "--temperature=1.0", "--use_chat",
                        "--verifier_use_chat", *SHORT]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("Question")] == [
        "Question: What is 3 + 4?", "Question: And 5?"]
    assert out.count("Verdict: INVALID") == 2 and "\x1b[" not in out  # random weights judge nothing; no terminal


def test_a_workdir_brings_its_settings(folder, tmp_path, capsys):
    config = load_config(str(ROOT / "configs/tiny.py"))
    for role in (config.generator, config.verifier):
        role.checkpoint, role.max_prompt, role.max_response = str(folder), 128, 16
    save_run(tmp_path, config)
    assert sample.main([f"--checkpoint={tmp_path}", "--question=cat#1 dog#2"]) == 0
    out = capsys.readouterr().out
    assert "Question: cat#1 dog#2" in out and "Verdict: " in out


def test_what_takes_a_while_is_said_on_standard_error(folder, capsys):
    assert sample.main([f"--checkpoint={folder}", "--question=What is 3 + 4?", *SHORT]) == 0
    assert capsys.readouterr().err.splitlines() == [
        f"reading the weights of the generator from {folder} ...",
        f"reading the weights of the verifier from {folder} ...",
        "solving (the first question of its length is also compiled) ...",
        "judging ...",
    ]


def shown(solution, verification, question="What is 3 + 4?", tokenizers=None, stops=False, read_limit=0,
          **console) -> str:
    """What is printed about a question; a text that is None is cut off, after <think>. `read_limit`: the verifier's
    marks are read, where they have no more tokens."""
    stream, args = io.StringIO(), argparse.Namespace(seed=0, temperature=0.0, top_p=1.0, second_try=False)
    generator, verifier = (
        scripted(tokenizer, lambda number, prompt, is_greedy, text=text: text, template, stops=stops)
        for tokenizer, text, template in zip(
            tokenizers or [small_tokenizer()] * 2, (solution, verification), (PROMPT, CLAIM), strict=True
        )
    )
    if read_limit:
        verifier.sampler.config.cache_buckets = (read_limit,)
        verifier = dataclasses.replace(verifier, reads_marks=True)
    sample.answer(question, generator, verifier, args, Console(file=stream, width=100, soft_wrap=True, **console))
    return stream.getvalue()


def test_steps_stand_beside_their_judgements_in_colour():
    out = shown(SOLUTION, VERIFICATION, force_terminal=True, color_system="standard")
    assert "\x1b[32m   CORRECT" in out and "\x1b[31m   INCORRECT" in out and "7 is not 8." in out
    assert out.index("3 + 4 = 7", out.index("Judgement")) < out.index("CORRECT", out.index("Judgement"))
    assert "Answer: " in out and "8" in out and "\x1b[1;31mINCORRECT" in out


def test_what_does_not_count_is_said():
    out = shown(SOLUTION, VERIFICATION)
    assert "cut off" not in out and "no step reward" not in out and "warning" not in out
    length = len(small_tokenizer().encode_response("<think>"))
    cut_off = f"was cut off after {length} tokens (raise --max_new).\n"
    assert f"| <think>\nThe solution {cut_off}" in shown(None, VERIFICATION)
    out = shown(SOLUTION, None)
    assert f"Judgement\nThe verification {cut_off}" in out
    assert "\n0 judgements for 2 steps: no step reward\n" in out
    one_more = VERIFICATION.replace("</step_verification>", "<step>\\boxed{CORRECT}</step></step_verification>")
    assert "\n3 judgements for 2 steps: no step reward\n" in shown(SOLUTION, one_more)
    one_fewer = VERIFICATION.replace("\\boxed{INCORRECT}</step>", "</step>")
    assert "\nno judgement of step 2: no step reward\n" in shown(SOLUTION, one_fewer)


def test_marks_that_do_not_fit_are_cut_off(monkeypatch):
    monkeypatch.setattr(judging, "make_logits_fn", lambda sampler: None)
    out = shown(SOLUTION, None, read_limit=16)  # and the marks of one step have more tokens
    assert "Judgement\nThe verification was cut off after 16 tokens (raise --max_new).\n" in out


def test_steps_after_the_first_error_are_not_missed_in_a_verifier_that_stops():
    stopped = VERIFICATION.replace("CORRECT", "INCORRECT", 1)
    stopped = stopped[: stopped.index("</step>") + 7] + stopped[stopped.index("</step_verification>") :]
    assert "\n1 judgement for 2 steps: no step reward\n" in shown(SOLUTION, stopped)
    out = shown(SOLUTION, stopped, stops=True)
    assert "no step reward" not in out and out.count("INCORRECT\n") and "no judgement" in out


def test_characters_that_a_tokenizer_does_not_know_are_named():
    printable = load_sentencepiece(printable_model())
    question = "Ist 3 \u00d7 4 gr\u00f6\u00dfer als 7?"
    unknown = "tokenizer has no token for '\u00d7', '\u00df', '\u00f6'"
    [warning] = [line for line in shown(SOLUTION, VERIFICATION, question, [printable] * 2).splitlines()
                 if line.startswith("warning: ")]
    assert warning == f"warning: the generator's {unknown} and the verifier's {unknown}: such a model cannot read it"
    out = shown(SOLUTION, VERIFICATION, question, [small_tokenizer(), printable])
    assert f"warning: the verifier's {unknown}: such a model" in out


def test_a_given_solution_is_judged_with_probabilities(folder, tmp_path, capsys, monkeypatch):
    scripted_verifier(monkeypatch, VERIFICATION)
    path = tmp_path / "solution.txt"
    path.write_text(SOLUTION)
    assert sample.main([f"--verifier={folder}", "--question=What is 3 + 4?", f"--solution={path}", *SHORT[1:]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["Question: What is 3 + 4?", "Judgement"] and lines[2] == "1. | 3 + 4 = 7"
    [(right, p_right), (wrong, p_wrong), (verdict, p_verdict)] = [
        line.split("   P(CORRECT) = ") for line in lines if "P(CORRECT)" in line]
    assert (right, wrong, verdict) == ("   CORRECT", "   INCORRECT", "Verdict: INCORRECT")
    assert p_verdict.endswith("   Answer: 8")
    assert all(0 < float(p.split()[0]) < 1 for p in (p_right, p_wrong, p_verdict))
    assert "   | 7 is not 8. \\boxed{INCORRECT}" in lines


@pytest.mark.parametrize("template, first, last", [
    ("math", "INCORRECT", "CORRECT"), ("math_first_error", "INCORRECT", "no judgement")])
def test_a_given_solution_is_judged_as_the_verifier_is_asked_to(folder, monkeypatch, capsys, template, first, last):
    """It judges both steps: where it is to stop, what it says after the first INCORRECT does not count."""
    scripted_verifier(monkeypatch, verification("INCORRECT", False, True))
    flags = [f"--verifier={folder}", f"--verifier_template={template}", "--max_prompt=1024", "--max_new=256"]
    assert sample.main([*flags, "--question=What is 3 + 4?", f"--solution={SOLUTION}"]) == 0
    marks = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("   ")
             and "| " not in line]
    assert [mark.partition("   ")[0] for mark in marks] == [first, last]


@pytest.mark.parametrize("text, steps", [("3 + 4 = 7\nso 8\nor 9", 3), ("3 + 4 = 7\nso 8\n\nor 9", 2)])
def test_a_reward_model_judges_steps_of_plain_text(text, steps, tmp_path, capsys):
    prm = write_trl_folder(tmp_path / "prm")
    assert sample.main([f"--verifier={prm}", "--question=What is 3 + 4?", f"--solution={text}"]) == 0
    out = capsys.readouterr().out
    assert out.count("P(CORRECT) = 0.") == steps + 1 and "no step reward" not in out


def test_a_reward_model_judges_what_is_sampled(folder, tmp_path, capsys):
    prm = write_trl_folder(tmp_path / "prm")
    flags = [f"--checkpoint={folder}", "--use_chat", f"--verifier={prm}", "--template=last_letter", "--max_new=24"]
    assert sample.main([*flags, "--question=What is 3 + 4?"]) == 0
    assert "The solution has no <step> blocks: no step can be judged" in capsys.readouterr().out


def test_mistakes_end_in_one_line(folder, capsys):
    for arguments, message in [
        (["--checkpoint=none.gguf"], "none.gguf does not exist"),
        ([f"--checkpoint={folder}", "--temperature=-1"], "--temperature=-1.0 must be 0, or lie between 1e-06"),
        ([f"--checkpoint={folder}", "--temperature=nan"], "--temperature=nan must be 0, or lie between"),
        ([f"--checkpoint={folder}", "--top_p=nan"], "--top_p=nan must be above 0.0 and at most 1.0"),
        ([f"--checkpoint={folder}", "--seed=-1"], "--seed=-1 must lie between 0 and 4294967295"),
        ([f"--checkpoint={folder}", "--max_new=-1"], "--max_new=-1 must be at least 0"),
        ([f"--checkpoint={folder}", "--max_new=9", "--max_prompt=4090"],
         "--max_prompt=4090 and --max_new=9 are more than the 4096 positions of"),
        ([f"--checkpoint={folder}", *SHORT[:3], "--verifier_template=math", "--max_prompt=99"],
         "the limit is 99: raise"),
        (["--checkpoint="], "checkpoint is empty: give a path"),
        ([f"--checkpoint={folder}", "--question= "], "--question is empty: give a question"),
        ([f"--checkpoint={folder}", "--template=maths"], "generator.template='maths' is neither"),
        ([f"--checkpoint={folder}", "--max_new=4096"], "--max_new=4096 leaves no room for a prompt"),
        ([f"--checkpoint={folder}", *SHORT[:3], "--max_prompt=4"], "; the limit is 4: shorten it"),
        ([f"--verifier={folder}", "--use_chat", "--solution=7"], "--use_chat: no --checkpoint is given; --use_chat is"),
        ([f"--checkpoint={folder}", "--verifier_use_chat"], "--verifier_use_chat: no --verifier is given; --use_chat"),
        ([], "nothing solves the question: name a --checkpoint"),
        (["--solution=7"], "nothing judges --solution: name a --verifier"),
        ([f"--verifier={folder}", "--solution= "], "--solution is empty: give a solution"),
        ([f"--verifier={folder}", "--solution=7", "--second_try"], "--solution is judged greedily, and nothing"),
        ([f"--verifier={folder}", "--solution=7", *SHORT[1:3], "--max_prompt=9"], "--solution: with its 1 steps the"),
    ]:
        with pytest.raises(SystemExit) as stopped:
            sample.main(["--question=What is 3 + 4?", *arguments])
        assert stopped.value.code == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
