"""Checkpoints that are opened for sampling, without a run: which limits and numbers they take from where."""

from support.paths import ROOT
from support.tiny_checkpoints import save_run, write_tiny_folder
from tango_jax.cli.command_line import load_config
from tango_jax.sampling.checkpoint_sampler import CheckpointSamplerSettings, open_checkpoint_sampler


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
