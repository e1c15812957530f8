"""What a start finds in a workdir: another process, another run, a finished one, or one that has lost something."""

import json
import os
import re
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from support.paths import ROOT
from support.policies import policies_of
from support.tiny_checkpoints import save_step, write_tiny_folder
from tango_jax import ablate, sft, train
from tango_jax.ablation import experiment
from tango_jax.ablation.planned_runs import make_plan
from tango_jax.cli.command_line import load_config
from tango_jax.config import ROLES
from tango_jax.evaluation import settings as evaluation_settings
from tango_jax.loop import run
from tango_jax.runtime.checkpoint import Restored
from tango_jax.runtime.console import Console
from tango_jax.runtime.lock import LOCK_FILE, locked
from tango_jax.tracking.loggers import RunLog
from tango_jax.tracking.metrics import MetricsWriter, check_log
from tango_jax.tracking.run_config import keep_config

SILENT = Console(enabled=False)


@pytest.fixture(scope="module")
def config():
    return load_config(str(ROOT / "configs/tiny.py"), ["compile_cache="])


@pytest.fixture
def workdir(tmp_path):
    return tmp_path / "run"


def contents(folder) -> dict:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def refused(call, *arguments) -> str:
    with pytest.raises(ValueError) as error:
        call(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


# ------------------------------------------------------------------------------------------------ another process


@pytest.fixture
def busy(workdir, config):
    """A workdir in which another process is at work, with a save in progress."""
    keep_config(config, workdir / "config.json")
    (workdir / "checkpoints" / "2.saving" / "state").mkdir(parents=True)
    (workdir / "metrics.jsonl").write_text("{}\n")
    program = ("import sys, time; from pathlib import Path; from tango_jax.runtime.console import Console; "
               "from tango_jax.runtime.lock import locked\n"
               "with locked(Path(sys.argv[1]), Console(False)): print('held', flush=True); time.sleep(600)")
    process = subprocess.Popen([sys.executable, "-c", program, str(workdir)], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    yield workdir
    process.send_signal(signal.SIGKILL)
    process.communicate()


@pytest.mark.parametrize("module, name", [(train, "train"), (sft, "sft"), (ablate, "ablate")])
def test_no_command_touches_a_workdir_that_another_process_works_in(busy, module, name, monkeypatch, capsys):
    monkeypatch.setattr("tango_jax.cli.session.configure", lambda config: None)
    before = contents(busy)
    with pytest.raises(SystemExit) as stopped:
        module.main([f"--config={ROOT / 'configs/tiny.py'}", f"--workdir={busy}"])
    assert re.fullmatch(rf"error: {busy} is in use by process \d+ on \S+: let it end, or choose another folder",
                        str(stopped.value))
    assert contents(busy) == before


# --------------------------------------------------------------------------------- mistakes that bind nobody to them


def test_a_refused_start_leaves_no_settings_behind(workdir, config, monkeypatch, tmp_path):
    wrong = config.copy_and_resolve_references()
    wrong.generator.init_from = str(tmp_path / "nowhere")
    assert "there is no stage-1 checkpoint" in refused(run.run_or_resume, wrong, workdir, SILENT)
    assert not (workdir / "config.json").exists() and not (workdir / LOCK_FILE).exists()

    def no_data(config, tokenizers, further, has_remarks):
        raise ValueError("task.train cannot be read")

    def run_all(config, workdir, console):
        experiment.run_experiment(make_plan(config, workdir), console)

    monkeypatch.setattr(run, "make_task", no_data)
    for call in (run.run_or_resume, run_all):
        assert refused(call, config, workdir, SILENT) == "task.train cannot be read"
    assert not (workdir / "config.json").exists()


def test_settings_are_kept_with_the_first_row(workdir, config):
    with RunLog(workdir, config, SILENT, resume_at=0) as writer:
        assert not (workdir / "config.json").exists()
        writer.write(0, "eval", {"generator/accuracy": 0.5})
        assert (workdir / "config.json").exists()
    directory = workdir / "sft" / "generator"
    with RunLog(directory, config, SILENT, 0, "sft generator", workdir / "sft.json") as writer:
        writer.position()  # a checkpoint follows
    assert (workdir / "sft.json").read_bytes() == (workdir / "config.json").read_bytes()
    assert not (directory / "config.json").exists()


# --------------------------------------------------------------------------------------------------- a finished run


def test_a_finished_run_needs_no_lock_and_is_not_written_to(workdir, config):
    keep_config(config, workdir / "config.json")
    verifier = {f"{kind}_f1_{when}": None for kind in ("step", "outcome") for when in ("initial", "final")}
    generator = {"accuracy_initial": 0.0, "accuracy_final": 0.5}
    summary = {"generator": generator, "verifier": verifier, "arm": "tango", "seed": 0, "wall_seconds": 1.0,
               "compiles_after_warmup": 0, "logprob_gap_max": 0.0}
    (workdir / "summary.json").write_text(json.dumps(summary))
    before = contents(workdir)
    other = config.copy_and_resolve_references()
    other.loggers.wandb = "another"
    with locked(workdir, SILENT):  # by another process, say
        assert run.run_or_resume(other, workdir, SILENT) == summary
    other.rl.gamma = 0.25
    assert "other settings (rl.gamma: 0.8 -> 0.25)" in refused(run.run_or_resume, other, workdir, SILENT)
    assert contents(workdir) == before
    (workdir / "config.json").unlink()
    assert "config.json is missing" in refused(run.run_or_resume, config, workdir, SILENT)


# ------------------------------------------------------------------------------------------ metrics and checkpoints


def write_rows(workdir, steps) -> int:
    with MetricsWriter(workdir / "metrics.jsonl") as writer:
        for step in steps:
            writer.write(step, "generator", {"generator_step": step})
        return writer.position()


def test_metrics_that_a_checkpoint_relies_on_are_missed(workdir):
    size = write_rows(workdir, [1, 2])
    path, restored = workdir / "metrics.jsonl", Restored(2, None, {"metrics_bytes": size})
    check_log(workdir, restored, 2)
    write_rows(workdir, [3])  # of a turn that will be made again
    check_log(workdir, restored, 2)
    whole = path.read_bytes()
    for damage, expected in (
        (lambda: path.write_bytes(whole[: size - 3]), f"{path} has {size - 3} bytes, but the checkpoint was saved"),
        (lambda: path.write_bytes(b"x" + whole), "is inside a line"),
        (path.unlink, f"{path} is missing, but the checkpoint was saved when it had {size}"),
    ):
        damage()
        before = contents(workdir)
        assert expected in (text := refused(check_log, workdir, restored, 2)) and "restore the file from a copy" in text
        assert contents(workdir) == before


def test_metrics_tell_of_checkpoints_that_are_gone(workdir):
    check_log(workdir, None, 2)
    write_rows(workdir, [1, 2, 3, 4])  # killed before the second save, which waits for the first
    check_log(workdir, None, 2)
    write_rows(workdir, [5])
    assert "reaches step 5, but there is no checkpoint beside it" in refused(check_log, workdir, None, 2)
    (workdir / "metrics.jsonl").unlink()
    write_rows(workdir, [1, 41, 42])  # the warm-up ended early, after one turn
    check_log(workdir, None, 2)
    write_rows(workdir, [43])
    assert "reaches step 43, but there is no checkpoint beside it" in refused(check_log, workdir, None, 2)


def test_the_evaluation_after_a_warm_up_that_ended_early_tells_of_no_checkpoint(workdir):
    """It is written before the checkpoint of its turn, and has the step at which the warm-up would have ended."""
    write_rows(workdir, [1, 2])
    with MetricsWriter(workdir / "metrics.jsonl", (workdir / "metrics.jsonl").stat().st_size) as writer:
        writer.write(40, "eval", {"generator_step": 0})
    before = contents(workdir)
    check_log(workdir, None, 2)
    assert contents(workdir) == before


def test_a_run_that_lost_its_metrics_says_so_before_stage_one(workdir, config, monkeypatch):
    """And one whose checkpoints have lost their manifests: neither starts afresh."""
    policies = policies_of(config)
    states = {role: jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), policy.abstract_state())
              for role, policy in policies.items()}
    for step in (2, 4):
        save_step(workdir / "checkpoints", step, states, {"metrics_bytes": 100, "turn": step})
    keep_config(config, workdir / "config.json")
    monkeypatch.setattr(run, "run_stage_one", None)
    text = refused(run.run_or_resume, config, workdir, SILENT, policies)
    assert text.startswith(f"{workdir / 'metrics.jsonl'} is missing, but the checkpoint was saved when it had 100")
    for step in ("2", "4"):
        os.unlink(workdir / "checkpoints" / step / "manifest.sha256")
    before = contents(workdir)
    assert "every checkpoint in" in refused(run.run_or_resume, config, workdir, SILENT, policies)
    assert contents(workdir) == before


def test_an_evaluation_without_its_settings_is_not_gone_on_with(tmp_path):
    path = tmp_path / "settings.json"
    evaluation_settings._compare(path, {"samples": 8})
    (tmp_path / "parts").mkdir()
    assert f"{path} is missing" in refused(evaluation_settings._compare, path, {"samples": 8})
    path.write_text('{"samples": 4}')
    assert "samples: 4 -> 8" in refused(evaluation_settings._compare, path, {"samples": 8})


@pytest.mark.parametrize("stage_one", [0, 2])
def test_a_start_with_damaged_weights_leaves_nothing_behind(tmp_path, workdir, stage_one):
    model = write_tiny_folder(tmp_path / "model")
    [weights] = model.glob("*.safetensors")
    arrays = load_file(weights)
    save_file(arrays | {"model.norm.weight": np.full_like(arrays["model.norm.weight"], np.nan)}, weights)
    of_a_role = (f"checkpoint={model}", f"sft.steps={stage_one}", "max_prompt=200", "max_response=100", "mesh.fsdp=1",
                 "prompt_buckets=()", "cache_buckets=()")
    overrides = [f"{role}.{setting}" for role in ROLES for setting in of_a_role]
    config = load_config("tiny", [*overrides, "compile_cache="])
    assert "the array final_norm holds values that are NaN" in refused(run.run_or_resume, config, workdir, SILENT)
    assert not workdir.exists()
    workdir.mkdir()
    refused(run.run_or_resume, config, workdir, SILENT)
    assert contents(workdir) == {}
