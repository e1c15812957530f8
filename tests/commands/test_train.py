"""`tango_jax.train.train`: training from a Python program, such as a notebook."""

import json
import signal
import threading
import traceback

import pytest

from support.policies import policies_of
from support.tiny_train import repeatable_rows
from tango_jax.runtime.console import Console
from tango_jax.runtime.lock import locked
from tango_jax.train import load_config, read_metrics, train
from torture.runs import ROLES, SMALL

SILENT = Console(enabled=False)


def mute(solution):
    return 0.0



@pytest.fixture(scope="module")
def config():
    same_shapes = ("mesh.fsdp=1", "sft.steps=0", "max_prompt=64", "max_response=48")  # fewer programs to compile
    return load_config("tiny", [*SMALL, *(f"{role}.{setting}" for role in ROLES for setting in same_shapes),
                                "rl.generator_steps=1", "compile_cache="])


@pytest.fixture(scope="module")
def compiled_once(config):
    """Further runs take what the first has compiled."""
    policies = policies_of(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tango_jax.loop.run.make_policies", lambda *_: policies)
        yield


@pytest.fixture(scope="module")
def finished(config, compiled_once, tmp_path_factory):
    """A run in a thread that is not the main one, as some notebooks and servers have; its workdir, and what it gave."""
    workdir, results = tmp_path_factory.mktemp("runs") / "new" / "run", []
    thread = threading.Thread(target=lambda: results.append(train(config, str(workdir), SILENT)))
    before = signal.getsignal(signal.SIGTERM)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before
    [summary] = results
    return workdir, summary


def test_it_returns_the_summary_and_leaves_the_files(finished):
    workdir, summary = finished
    assert summary == json.loads((workdir / "summary.json").read_text()) and summary["arm"] == "tango"
    rows = read_metrics(workdir)
    assert rows == read_metrics(workdir / "metrics.jsonl")
    assert [row["phase"] for row in rows if row["phase"] != "eval"] == ["warmup", "generator", "verifier"]
    assert not (workdir / "run.lock").exists()


def test_a_second_call_finds_the_run_finished_and_leaves_signals_alone(finished, config, capsys):
    workdir, summary = finished
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)]
    assert train(config, workdir) == summary
    assert f"{workdir} holds a finished run" in capsys.readouterr().out
    assert handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)]
    assert train(config, workdir, SILENT) == summary and capsys.readouterr().out == ""


def test_another_call_goes_on_where_the_first_was_interrupted(finished, config, tmp_path, monkeypatch):
    done, summary = finished

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("tango_jax.loop.run.write_results", interrupted)
        train(config, tmp_path / "run", SILENT)
    assert not (tmp_path / "run" / "run.lock").exists()
    again = train(config, tmp_path / "run", SILENT)
    assert again | {"wall_seconds": 0} == summary | {"wall_seconds": 0}
    assert repeatable_rows(tmp_path / "run" / "metrics.jsonl") == repeatable_rows(done / "metrics.jsonl")


def test_mistakes_are_the_commands_errors(finished, config, tmp_path):
    workdir, _ = finished
    with pytest.raises(ValueError, match=r"^rl\.gamma=-1\.0 must lie between 0\.0 and 100\.0"):
        train(changed(config, "rl", "gamma", -1.0), tmp_path / "run", SILENT)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^workdir=.*/file is a file; name a folder"):
        train(config, tmp_path / "file", SILENT)
    with pytest.raises(ValueError, match=r"holds a run with other settings \(rl\.gamma: 0\.8 -> 0\.5\)"):
        train(changed(config, "rl", "gamma", 0.5), workdir, SILENT)
    with pytest.raises(ValueError, match=r"generator\.rewards=none\.py:f: there is no file none\.py"):
        train(changed(config, "generator", "rewards", ("none.py:f",)), tmp_path / "run", SILENT)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_workdir_that_is_in_use_is_refused(config, tmp_path):
    with locked(tmp_path / "run", SILENT), pytest.raises(ValueError, match="is in use by"):
        train(config, tmp_path / "run", SILENT)


def changed(config, group: str, key: str, value):
    other = config.copy_and_resolve_references()
    other[group][key] = value
    return other


def test_metrics_of_no_run_name_the_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl"):
        read_metrics(tmp_path)


def test_overrides_may_be_a_mapping():
    mapping = {"rl.warmup_steps": 1, "generator.optimizer.lr": 1, "generator.row_buckets": [4], "arm": "grpo"}
    texts = ["rl.warmup_steps=1", "generator.optimizer.lr=1", "generator.row_buckets=(4,)", "arm=grpo"]
    assert load_config("tiny", mapping) == load_config("tiny", texts) != load_config("tiny")
    for config in (load_config("tiny", mapping), load_config("tiny", {})):
        assert config.is_locked


@pytest.mark.parametrize("overrides, message", [
    ({"rl.warmup": 1, "seed": "x"}, "unknown config key 'rl.warmup'; did you mean rl.warmup_steps?\n"
     "seed='x' must be of type int, like its default 0"),
    (["rl.warmup=1"], "unknown config key 'rl.warmup'; did you mean rl.warmup_steps?"),
    ({"generator.rewards": mute}, f"generator.rewards={mute!r} must be of type tuple, like its default (); a setting "
     "takes the name of a function, FILE.py:name or package.module:name"),
    ("rl.warmup_steps=1", "overrides='rl.warmup_steps=1' must be a list, such as ['rl.warmup_steps=1'], or a mapping, "
     "such as {'rl.warmup_steps': 1}"),
    ([("rl.warmup_steps", 1)], "overrides=[('rl.warmup_steps', 1)] must be a list, such as ['rl.warmup_steps=1'], or a "
     "mapping, such as {'rl.warmup_steps': 1}"),
])
def test_a_traceback_ends_with_the_whole_message(overrides, message):
    with pytest.raises(ValueError) as error:
        load_config("tiny", overrides)
    assert "".join(traceback.format_exception(error.value)).endswith(f"Error: {message}\n")
