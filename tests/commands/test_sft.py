"""Stage 1 by itself, and a run that starts from it."""

import json

import pytest

from support.paths import CONFIGS
from tango_jax import sft, train
from torture.runs import ROLES, SMALL


@pytest.mark.long
def test_stage_one_alone_is_what_another_run_starts_from(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tango_jax.cli.session.configure", lambda config: None)
    overrides = [*SMALL, *(f"{role}.mesh.fsdp=1" for role in ROLES), "rl.warmup_steps=0", "rl.generator_steps=1"]
    command = [f"--config={CONFIGS / 'tiny.py'}", *(f"--config.{override}" for override in overrides)]
    sft.main([*command, f"--workdir={tmp_path / 'sft'}"])
    said = capsys.readouterr().out
    for role in ROLES:
        assert f"{role}: {tmp_path / 'sft' / 'sft' / role}" in said
        assert (tmp_path / "sft" / "sft" / role / "checkpoints" / "2").is_dir()
    assert json.loads((tmp_path / "sft" / "config.json").read_text())["generator.sft.steps"] == 2
    start = [f"--config.{role}.init_from={tmp_path / 'sft'}" for role in ROLES]
    train.main([*command, *start, f"--workdir={tmp_path / 'run'}"])
    assert (tmp_path / "run" / "summary.json").exists() and not (tmp_path / "run" / "sft").exists()


def test_a_metric_of_the_best_that_is_never_measured_is_refused_before_stage_one(tmp_path):
    """An experiment makes its stage 1 with this command, before any run."""
    with pytest.raises(SystemExit, match="checkpoint.keep_best=generator/acuracy cannot choose among the checkpoints"):
        sft.main([f"--config={CONFIGS / 'tiny.py'}", f"--workdir={tmp_path / 'run'}",
                  "--config.checkpoint.keep_best=generator/acuracy"])
    assert not (tmp_path / "run/sft").exists()
