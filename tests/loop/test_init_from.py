"""What `init_from` starts from: a stage 1 that is there, finished and within its gates, looked at before any work."""

import jax
import numpy as np
import pytest

from support.paths import ROOT, TESTS
from support.tiny_checkpoints import save_step
from tango_jax import sft
from tango_jax.ablation.experiment import run_experiment
from tango_jax.ablation.planned_runs import make_plan
from tango_jax.cli.command_line import load_config
from tango_jax.loop import stage_one
from tango_jax.loop.init_from import UNTRAINED, check_init_from, how_it_judged, what_it_lacks
from tango_jax.loop.run import run_or_resume
from tango_jax.rl.policy import make_policy
from tango_jax.runtime.console import Console
from tango_jax.runtime.sealed import MANIFEST
from tango_jax.tracking.provenance import begin
from tango_jax.tracking.run_config import save_config
from tango_jax.weights.workdir import start_source

TINY = str(ROOT / "configs/tiny.py")
LENGTH = 6  # sft.steps of configs/tiny.py


def tiny(*overrides: str):
    return load_config(TINY, [f"generator.{override}" for override in overrides])


@pytest.fixture
def source(tmp_path):
    """make(step, meta, *overrides): a workdir as a stage 1 of the generator leaves it."""

    def make(step=LENGTH, meta=None, *overrides, settings=True):
        workdir = tmp_path / "source"
        if settings:
            save_config(tiny(*overrides), workdir / "config.json")
        if step is not None:
            meta = {"heldout_loss": 0.4, "seconds": 1.0, "metrics_bytes": 0} if meta is None else meta
            state = {"params": {"weight": np.ones(2, np.float32)}}
            save_step(workdir / "sft/generator/checkpoints", step, state, meta)
        return workdir

    return make


def starting_from(workdir, *overrides):
    return tiny(f"init_from={workdir}", *overrides)


@pytest.mark.parametrize("step, meta, old, here, message", [
    (None, None, [], [], "there is no stage-1 checkpoint of the generator in .*: run python -m tango_jax.sft with"),
    (None, None, ["sft.steps=0"], [], r"had no stage 1 of the generator .*set generator\.checkpoint=.*source and"),
    (None, None, ["init_from=runs/first"], [], "that run took its own from runs/first, so name that"),
    (3, None, [], [], "unfinished, at step 3 of 6: run its command again to finish it"),
    (3, None, [], ["sft.steps=0"], "unfinished, at step 3 of 6"),
    (3, None, [], ["sft.steps=3"], "unfinished, at step 3 of 6"),
    (3, None, ["sft.steps=3"], [], r"has 3 steps, but generator\.sft\.steps=6 .* or set generator\.sft\.steps=3 here"),
    (6, None, ["sft.max_heldout_loss=0.3"], [], r"0\.400 per token and so failed its own gate, .*loss=0\.3:"),
    (6, None, [], ["sft.max_heldout_loss=0.39"], r"0\.400 per token; the gate here is .*max_heldout_loss=0\.39"),
    (6, {"heldout_loss": float("inf")}, ["sft.max_heldout_loss=1.0"], [], "failed its own gate"),
])
def test_what_is_no_start_is_refused_before_anything_is_made(source, tmp_path, monkeypatch, step, meta, old, here,
                                                             message):
    config = starting_from(source(step, meta, *old), *here)

    def must_not_be_called(*arguments):
        raise AssertionError("work began")

    for module in ("tango_jax.loop.run", "tango_jax.ablation.experiment"):
        monkeypatch.setattr(f"{module}.make_policies", must_not_be_called)

    def ablate(config, workdir, console):
        run_experiment(make_plan(config, workdir), console)

    for start in (run_or_resume, ablate):
        with pytest.raises(ValueError, match=rf"^generator\.init_from=.*source: .*{message}") as error:
            start(config, tmp_path / "run", Console(enabled=False))
        assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("step, meta, old, here", [
    (6, None, [], []),
    (6, None, [], ["sft.steps=0"]),
    (6, None, [], ["sft.steps=3"]),
    (3, None, ["sft.steps=3"], ["sft.steps=3"]),  # what the message above proposes
    (6, None, ["sft.max_heldout_loss=0.4"], ["sft.max_heldout_loss=0.5"]),
])
def test_a_finished_stage_one_is_a_start(source, step, meta, old, here):
    config = starting_from(source(step, meta, *old), *here)
    before = config.to_dict()
    assert check_init_from(config) is None and config.to_dict() == before


def store_arm(workdir, arm: str) -> None:
    """What a run of this arm leaves of it; nothing of an arm without a name."""
    workdir.mkdir(parents=True, exist_ok=True)
    if arm:
        begin(load_config(TINY, f"arm={arm}".split()), workdir, Console(enabled=False)).keep(workdir)


def own_arm(folder, is_one_policy: bool) -> str:
    (folder / "own.py").write_text(
        "import dataclasses\nfrom tango_jax.method.arms import ARMS\n"
        f"mine = dataclasses.replace(ARMS['tango'], label='mine', is_one_policy={is_one_policy})\n")
    return f"{folder}/own.py:mine"


@pytest.mark.parametrize("old, here, is_refused", [
    ("tango", ("arm=self_verify",), True),
    ("grpo", ("verifier.adapter=generator",), True),
    ("second_try", ("arm=self_verify",), False),
    ("tango", ("arm=grpo",), False),
    ("an own arm of two policies", ("arm=self_verify",), True),
    ("an own arm of one policy", ("arm=self_verify",), False),
])
def test_one_policy_does_not_start_from_two(source, tmp_path, old, here, is_refused):
    """It would go on from the verifier's parameters alone, which have not learned to solve."""
    if old.startswith("an own arm"):
        old = own_arm(tmp_path, is_one_policy="one policy" in old)
    store_arm(tmp_path / "source", old)
    save_config(load_config(TINY, [f"arm={old}"]), tmp_path / "source/config.json")
    workdir, state = source(settings=False), {"params": {"weight": np.ones(2, np.float32)}}
    save_step(workdir / "sft/verifier/checkpoints", LENGTH, state, {"heldout_loss": 0.4})
    start = [f"{role}.init_from={workdir}" for role in ("generator", "verifier")]
    config = load_config(TINY, [*start, *here])
    if not is_refused:
        return check_init_from(config)
    with pytest.raises(ValueError, match=r"^verifier\.init_from=.*: here both roles are one policy, but that run has"):
        check_init_from(config)


def test_the_first_half_of_one_policys_stage_one_is_called_so(tmp_path):
    store_arm(tmp_path, "self_verify")
    save_config(load_config(TINY, ["arm=self_verify"]), tmp_path / "config.json")
    config = load_config(TINY, ["arm=grpo"])
    assert what_it_lacks(config, "generator", str(tmp_path)) == ""  # its verifier has no stage 1
    params = {"params": {"weight": np.ones(2, np.float32)}}
    save_step(tmp_path / "sft/verifier/checkpoints", LENGTH, params, {UNTRAINED: True})
    assert what_it_lacks(config, "generator", str(tmp_path)) == ""  # there was nothing that it could have learned
    save_step(tmp_path / "sft/verifier/checkpoints", LENGTH + 1, params, {})
    said = what_it_lacks(config, "generator", str(tmp_path))
    assert said.endswith(f": to start after both, set verifier.adapter=generator and verifier.init_from={tmp_path}")


def test_one_policy_starts_after_all_of_one_policys_stage_one(source, tmp_path):
    store_arm(tmp_path / "source", "self_verify")
    save_config(load_config(TINY, ["arm=self_verify"]), tmp_path / "source/config.json")
    workdir, state = source(settings=False), {"params": {"weight": np.ones(2, np.float32)}}
    save_step(workdir / "sft/verifier/checkpoints", LENGTH, state, {"heldout_loss": 0.4})
    settings = ["arm=self_verify", f"generator.init_from={workdir}", "verifier.sft.steps=0"]
    with pytest.raises(ValueError, match=r"^generator\.init_from=.*and then the verifier's: set verifier\.init_from="):
        check_init_from(load_config(TINY, settings))
    check_init_from(load_config(TINY, [*settings, f"verifier.init_from={workdir}"]))


def test_a_stage_one_that_could_not_teach_a_prompt_is_not_said_to_have_it(tmp_path, monkeypatch):
    """A user's task without further examples, whatever the arm asks for."""
    monkeypatch.setattr("tango_jax.tracking.provenance.teaches_further_prompts", lambda config: False)
    store_arm(tmp_path, "second_try")
    config = load_config(TINY, ["arm=second_try"])
    assert what_it_lacks(config, "generator", str(tmp_path)).startswith(", which has no examples of second_try")


@pytest.mark.parametrize("old, here, role, said", [
    ("meta_judged", "taught_verifier", "verifier", ", which has no examples of informed"),
    ("taught_verifier", "taught_verifier", "verifier", ""),
    ("second_try", "grpo", "generator", ""),
    ("self_verify", "second_try verifier.adapter=generator", "verifier", ", which has no examples of second_try"),
    ("second_try verifier.adapter=generator", "second_try verifier.adapter=generator", "verifier", ""),
    ("", "second_try", "generator", ""),  # a run of another version
    # One policy from the generator of two, whose verifier is another policy; it then has a stage 1, or none.
    ("scored", "self_verify verifier.sft.steps=0", "generator", ""),
    *((old, f"meta_judged verifier.adapter=generator verifier.sft.steps={steps}", "generator", said)
      for old in ("meta_judged", "tango") for steps, said in ((0, ", which has no examples of second_judgement"),
                                                              (6, ""))),
])
def test_a_stage_one_without_the_prompts_of_the_arm_says_so(tmp_path, old, here, role, said):
    store_arm(tmp_path, old)
    if old:
        save_config(load_config(TINY, f"arm={old}".split()), tmp_path / "config.json")
    assert what_it_lacks(load_config(TINY, f"arm={here}".split()), role, str(tmp_path)) == said


@pytest.mark.parametrize("old, name", [("tango", "rewrite"), ("", "rewrite"), ("second_try", "second_try")])
def test_no_stage_one_has_examples_of_a_users_prompt(tmp_path, old, name):
    """Whichever run made it, one of the same arm included, and whatever the prompt is called."""
    turns = (TESTS / "support/own_turns.py").read_text()
    (tmp_path / "own.py").write_text(turns.replace('Prompt("rewrite"', f'Prompt("{name}"'))
    own = f"{tmp_path}/own.py:rewriting"
    store_arm(tmp_path / "source", old or own)
    said = what_it_lacks(load_config(TINY, [f"arm={own}"]), "generator", str(tmp_path / "source"))
    assert said == f", which has no examples of {name}"


@pytest.mark.parametrize("old, here, said", [
    ("scored", "tango", ", whose verifications have no remarks"), ("scored_exact", "scored", ""),
    ("tango", "scored", ", whose verifications have remarks"), ("tango", "fixed_verifier", ""),
])
def test_a_verifier_of_another_form_is_told_of(tmp_path, old, here, said):
    store_arm(tmp_path, old)
    save_config(load_config(TINY, [f"arm={old}"]), tmp_path / "config.json")
    assert how_it_judged(load_config(TINY, [f"arm={here}"]), str(tmp_path)) == said


def test_a_workdir_without_settings_goes_by_the_settings_here(source):
    workdir = source(3, settings=False)
    check_init_from(starting_from(workdir, "sft.steps=3"))
    with pytest.raises(ValueError, match=r"generator\.sft\.steps=6 requires more"):
        check_init_from(starting_from(workdir))
    (workdir / "config.json").write_text("{")
    check_init_from(starting_from(workdir, "sft.steps=3"))


def test_a_step_that_cannot_be_read_is_no_start(source):
    workdir = source(6)
    for path in (workdir / "sft/generator/checkpoints/6").rglob("*"):
        if path.is_file() and path.name != MANIFEST:
            path.write_bytes(b"")
    with pytest.raises(ValueError, match="every checkpoint in .* is damaged"):
        check_init_from(starting_from(workdir))
    policy = make_policy("generator", tiny().generator, start_source(tiny(), "generator"))
    with pytest.raises(ValueError, match="every checkpoint in .* is damaged"):
        stage_one.load_sft(policy, str(workdir))


def test_a_flipped_byte_in_the_record_is_not_believed(source, caplog):
    """The step before is looked at, which is unfinished; what the damaged record says is not."""
    source(3)
    workdir = source(6, {"heldout_loss": 0.9})
    record = next(path for path in (workdir / "sft/generator/checkpoints/6/record").rglob("*") if path.is_file())
    record.write_bytes(record.read_bytes().replace(b"0.9", b"0.1"))
    with pytest.raises(ValueError, match="unfinished, at step 3 of 6"):
        check_init_from(starting_from(workdir, "sft.max_heldout_loss=0.5"))
    assert "is damaged: record/" in caplog.text and "falling back to step 3" in caplog.text


def test_what_is_finished_is_looked_at_again_when_it_is_loaded(source):
    workdir = source(None)
    policy = make_policy("generator", tiny().generator, start_source(tiny(), "generator"))
    params = jax.tree.map(lambda leaf: np.full(leaf.shape, 1.0, leaf.dtype), policy.abstract_state().params)
    directory = workdir / "sft/generator/checkpoints"
    save_step(directory, 5, {"params": params}, {"heldout_loss": 0.4, "is_full": True})
    with pytest.raises(ValueError, match="unfinished, at step 5 of 6"):
        stage_one.load_sft(policy, str(workdir))
    save_step(directory, 6, {"params": params}, {"heldout_loss": 0.4, "is_full": True})
    assert stage_one.load_sft(policy, str(workdir)).step == 6


@pytest.mark.parametrize("overrides, message", [
    (["generator.sft.steps=0", "verifier.sft.steps=0"], r"no role has a stage 1 to run .*generator\.sft\.steps=0"),
    (["generator.init_from=elsewhere", "verifier.sft.steps=0"], r"generator\.init_from='elsewhere'.*init_from=\)"),
    (["generator.init_from=none", "verifier.sft.start=generator"], r"generator\.init_from=none: there is no stage-1"),
])
def test_the_command_for_stage_one_says_when_there_is_none(tmp_path, monkeypatch, overrides, message):
    """Before, it read the weights of both models and left nothing."""
    monkeypatch.setattr("tango_jax.cli.session.configure", lambda config: None)
    arguments = [f"--config={TINY}", f"--workdir={tmp_path / 'run'}", *(f"--config.{item}" for item in overrides)]
    with pytest.raises(SystemExit, match=f"^error: .*{message}"):
        sft.main(arguments)
    assert not (tmp_path / "run").exists()
