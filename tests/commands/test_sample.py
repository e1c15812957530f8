"""`python -m tango_jax.sample`: any checkpoint answers, another or the same one judges, mistakes end in one line."""

import io

import pytest
from rich.console import Console

from support.paths import ROOT
from support.tiny_checkpoints import save_run, write_tiny_folder, write_tiny_gguf
from tango_jax import sample
from tango_jax.cli.command_line import load_config

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
    assert sample.main([f"--checkpoint={gguf}", f"--verifier={folder}", "--temperature=1.0", "--use_chat", *SHORT]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("Question")] == [
        "Question: What is 3 + 4?", "Question: And 5?"]  # fmt: skip
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


def test_steps_stand_beside_their_judgements_in_colour(monkeypatch):
    texts = {"solve": SOLUTION, "verify": VERIFICATION}
    monkeypatch.setattr(sample, "sample_text", lambda sampler, prompt, args, name: texts[name])
    monkeypatch.setattr(sample, "generator_prompt", lambda *arguments: [1])
    monkeypatch.setattr(sample, "verifier_prompt", lambda *arguments: ([1], False))
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, color_system="standard", width=100, soft_wrap=True)
    source = type("Opened", (), {"tokenizer": None})()
    sampler = sample.CheckpointSampler(source, None, None, "", 10, 3)
    sample.answer("What is 3 + 4?", sampler, sampler, None, console)
    out = stream.getvalue()
    assert "\x1b[32m   CORRECT" in out and "\x1b[31m   INCORRECT" in out and "7 is not 8." in out
    assert out.index("3 + 4 = 7", out.index("Judgement")) < out.index("CORRECT", out.index("Judgement"))
    assert "Answer: " in out and "8" in out and "\x1b[1;31mINCORRECT" in out


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
    ]:
        with pytest.raises(SystemExit) as stopped:
            sample.main(["--question=What is 3 + 4?", *arguments])
        assert stopped.value.code == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
