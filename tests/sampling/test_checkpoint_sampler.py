"""Checkpoints that are opened for sampling, without a run: which limits and numbers they take from where."""

import pytest

from support.paths import ROOT
from support.tiny_checkpoints import save_run, write_tiny_folder
from tango_jax import export
from tango_jax.cli.command_line import load_config
from tango_jax.records import Problem
from tango_jax.sampling.checkpoint_sampler import CheckpointSamplerSettings, open_checkpoint_sampler
from tango_jax.text.templates import TEMPLATES, generator_prompt


def test_responses_of_a_run_are_as_long_as_in_training(tmp_path):
    """Also where they take more than half of the 4,096 positions; of another checkpoint, half are left for prompts."""
    folder = write_tiny_folder(tmp_path / "model")
    config = load_config(str(ROOT / "configs/tiny.py"))
    for role in (config.generator, config.verifier):
        role.checkpoint, role.max_prompt, role.max_response = str(folder), 128, 3000
        role.model.head_precision = "bfloat16_x3"
    save_run(tmp_path / "run", config)
    run = open_checkpoint_sampler("generator", str(tmp_path / "run"), CheckpointSamplerSettings())
    assert (run.max_prompt, run.sampler.config.cache_buckets[-1]) == (128, 3000)
    assert run.source.model_config.head_precision == "highest"  # the run chose for its own devices
    other = open_checkpoint_sampler("generator", str(folder), CheckpointSamplerSettings(default_tokens=3000))
    assert (other.max_prompt, other.sampler.config.cache_buckets[-1]) == (2048, 2048)


def run_with_a_prompt_of_its_own(folder, workdir):
    """Saved by a run whose prompts are chat turns of its own text."""
    config = load_config(str(ROOT / "configs/tiny.py"))
    config.task.min_steps = 2
    for role in (config.generator, config.verifier):
        role.checkpoint, role.max_prompt, role.max_response, role.use_chat = str(folder), 128, 48, True
    config.generator.template = "Say: {problem}"
    save_run(workdir, config)
    return workdir


def asked(name: str, role: str = "generator", **settings):
    """A prompt, the limits and the least number of steps of a checkpoint."""
    sampler = open_checkpoint_sampler(role, str(name), CheckpointSamplerSettings(**settings))
    prompt = generator_prompt(sampler.template, sampler.tokenizer, Problem("asked", "What is 3 + 4?", "7"))
    return prompt, sampler.max_prompt, sampler.sampler.config.cache_buckets[-1], sampler.min_steps


def test_an_export_is_asked_as_its_run_was(tmp_path, hub):
    run = run_with_a_prompt_of_its_own(write_tiny_folder(tmp_path / "model"), tmp_path / "run")
    out = export.export(run, "generator", tmp_path / "out")
    assert asked(out) == asked(run) and asked(out)[1:] == (128, 48, 2)
    hub.add("team/model", "c" * 40, out, "main")
    assert asked("team/model") == asked(run)  # and also once it is on the hub
    assert asked(out, template="Other: {problem}") == asked(run, template="Other: {problem}") != asked(run)


@pytest.mark.parametrize("template, of_run, of_model", [
    (None, True, False), ("math", False, False), ("math_first_error", True, True),
    ("{problem}{solution}{num_steps}", True, False)])
def test_a_verifier_stops_where_its_template_asks_it_to(tmp_path, template, of_run, of_model):
    """A text of one's own is taken to ask what the run's asked."""
    folder, config = write_tiny_folder(tmp_path / "model"), load_config(str(ROOT / "configs/tiny.py"))
    for role in (config.generator, config.verifier):
        role.checkpoint, role.max_prompt, role.max_response = str(folder), 128, 48
    config.verifier.stop_at_first_error = True
    save_run(tmp_path / "run", config)
    for name, stops in ((tmp_path / "run", of_run), (folder, of_model)):
        sampler = open_checkpoint_sampler("verifier", str(name), CheckpointSamplerSettings(template, default_tokens=64))
        assert sampler.stops == stops


def test_an_exported_generator_that_judges_has_no_prompt_for_it(tmp_path):
    run = run_with_a_prompt_of_its_own(write_tiny_folder(tmp_path / "model"), tmp_path / "run")
    out = export.export(run, "generator", tmp_path / "out")
    judge = open_checkpoint_sampler("verifier", str(out), CheckpointSamplerSettings(default_tokens=64))
    assert (judge.template, judge.max_prompt) == (TEMPLATES["verifier", "math"], 64)


@pytest.mark.parametrize("name, text, message", [
    ("prompting.json", "{", "cannot be read"),
    ("prompting.json", '{"role": "generator"}', "cannot be read"),
    ("prompt_template.txt", None, "No such file"),
    ("prompting.json", '{"role": "generator", "use_chat": 1, "max_prompt": 1, "max_new_tokens": 1, "min_steps": 1}',
     "use_chat=1"),
])
def test_a_damaged_export_says_so(tmp_path, name, text, message):
    run = run_with_a_prompt_of_its_own(write_tiny_folder(tmp_path / "model"), tmp_path / "run")
    out = export.export(run, "generator", tmp_path / "out")
    (out / name).unlink()
    if text is not None:
        (out / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        asked(out)
