"""The log of a run: what follows metrics.jsonl has every row once, however often the run was killed and resumed."""

import contextlib
import io
import json
import os
import shutil
import signal
import struct
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.paths import ROOT
from support.processes import wait_for
from tango_jax.cli.command_line import load_config
from tango_jax.cli.validation import validate
from tango_jax.config import default_config
from tango_jax.runtime import hosts
from tango_jax.runtime.console import Console
from tango_jax.tracking.loggers import SAMPLED_FOR_BOTH, RunLog, _names_apart, check_installed
from tango_jax.tracking.metrics import read_metrics


def make_config(**loggers):
    config = default_config()
    config.loggers.update(loggers)
    return config


def open_log(folder: Path, config, resume_at: int = 0) -> tuple[RunLog, io.StringIO]:
    stream = io.StringIO()
    return RunLog(folder, config, Console(stream=stream), resume_at), stream


def write_turns(log: RunLog, first: int, last: int, every: int = 3) -> None:
    """A row for every turn, and after every third turn that of an evaluation, which has the same step."""
    for step in range(first, last + 1):
        log.write(step, "generator", {"generator_step": step - 1, "generator/kl": 0.02 * min(step - 1, 1),
                                      "time/turn_s": 1.5})
        if step % every == 0:
            log.write(step, "eval", {"generator_step": step, "generator/accuracy": step / 10, "time/turn_s": 2.5,
                                     "not/finite": float("nan")})


# ---------------------------------------------------------------------------------------------------- packages


@pytest.mark.parametrize("key, value, package", [("tensorboard", True, "tensorboardX"), ("wandb", "tango", "wandb")])
def test_a_missing_package_is_one_error_before_any_work(monkeypatch, tmp_path, key, value, package):
    # W&B leaves a folder of its name behind; Python would import it as a package without files.
    (tmp_path / package).mkdir()
    message = rf"^loggers\.{key}={value} needs the package {package}: pip install '{package}>=.*', or switch the logger"
    for path in ([], [str(tmp_path)]):
        monkeypatch.setattr(sys, "path", path)
        with pytest.raises(ValueError, match=message):
            check_installed(make_config(**{key: value}).loggers)
        with pytest.raises(ValueError, match=message):
            validate(load_config(str(ROOT / "configs/tiny.py"), [f"loggers.{key}={value}"]))
    check_installed(default_config().loggers)  # nothing is needed where nothing is asked for


# -------------------------------------------------------------------------------------------- Weights & Biases


@pytest.fixture
def wandb(monkeypatch, tmp_path_factory):
    """The library itself, which writes to disk what it would send."""
    module = pytest.importorskip("wandb", reason="the W&B logger's package is optional")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name, value in {"MODE": "offline", "BASE_URL": "http://127.0.0.1:9", "ERROR_REPORTING": "false"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))  # where it would find a login
    yield module
    end(module)


def end(wandb) -> None:
    """Wait for the library's process, which writes on after a run has finished."""
    with contextlib.suppress(ConnectionResetError):  # a test has killed it
        wandb.teardown()


class OfflineRun(NamedTuple):
    """What a folder of W&B holds for `wandb sync`."""

    run: Any  # the record with its names and its config
    rows: list[tuple[int, dict[str, Any]]]  # (W&B's step, what was logged)
    exit_code: int | None  # None: it has not ended
    step_metrics: dict[str, str]

    @property
    def config(self) -> dict[str, Any]:
        return {item.key: json.loads(item.value_json) for item in self.run.config.update}


def offline_runs(wandb, folder: Path) -> list[OfflineRun]:
    """The runs in a workdir that were stored, oldest first.

    Their files are logs as LevelDB has them, after a header of seven bytes: blocks of 32 KiB with parts of protobufs,
    each after a checksum, a size and a kind (1 whole, 2 first, 3 middle, 4 last). The library has no reader of them.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    end(wandb)
    runs = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        data, position, part, records = path.read_bytes(), 7, b"", []
        while position + 7 <= len(data):
            if (left := 32768 - position % 32768) < 7:
                position += left
                continue
            size, kind = struct.unpack_from("<HB", data, position + 4)
            part += data[position + 7 : position + 7 + size]
            position += 7 + size
            if kind in (1, 4):
                records, part = [*records, Record.FromString(part)], b""
        by_kind = {kind: [getattr(record, kind) for record in records if record.WhichOneof("record_type") == kind]
                   for kind in ("run", "history", "exit", "metric")}
        if not by_kind["run"]:
            continue
        rows = [{item.nested_key[0] or item.key: json.loads(item.value_json) for item in history.item}
                for history in by_kind["history"]]
        runs.append(OfflineRun(
            by_kind["run"][0],
            [(row["_step"], {name: value for name, value in row.items() if not name.startswith("_")}) for row in rows],
            next((ended.exit_code for ended in by_kind["exit"]), None),
            {metric.glob_name or metric.name: metric.step_metric for metric in by_kind["metric"]},
        ))
    return runs


def followed(row: dict) -> dict:
    """What other loggers are told of a row: its finite values; and an evaluation's seconds apart from the turn's."""
    shared = ("generator_step", "time/", "memory/") if row["phase"] == "eval" else ()
    trained = {"generator": "generator", "verifier": "verifier", "warmup": "verifier"}.get(row["phase"], "")

    def told(name: str) -> str:
        is_sampled = name.endswith(SAMPLED_FOR_BOTH) and not name.startswith(f"{trained}/")
        is_apart = trained == "verifier" if name.startswith("grader/") else trained and is_sampled
        return f"{trained}_turn/" * bool(is_apart) + "eval/" * name.startswith(shared) + name

    return {told(name): value for name, value in row.items() if value is not None}


def logged(folder: Path) -> list[tuple[int, dict[str, Any]]]:
    """What W&B should have of the metrics.jsonl there."""
    return [(index, followed(row)) for index, row in enumerate(read_metrics(folder / "metrics.jsonl"))]


def test_wandb_has_all_that_a_run_logged(wandb, tiny_run, tmp_path):
    """Switched on for the last start of a run, it gets all rows."""
    shutil.copy(tiny_run.workdir / "metrics.jsonl", tmp_path)
    size = (tmp_path / "metrics.jsonl").stat().st_size
    open_log(tmp_path, make_config(wandb="tango"), size)[0].close()
    (run,) = offline_runs(wandb, tmp_path)
    assert run.rows == logged(tmp_path) and len(run.rows) > 10
    assert run.exit_code == 0 and run.step_metrics["*"] == "step"


@pytest.mark.parametrize("delivered", [0, 5, 9, 11], ids=["none", "few", "to the checkpoint", "more than are kept"])
def test_wandb_is_given_what_its_server_lacks_after_a_kill(wandb, monkeypatch, tmp_path, delivered):
    """The number of rows that the server has is the one thing that is made up here."""
    config = make_config(wandb="tango")
    log, _ = open_log(tmp_path, default_config())
    write_turns(log, 1, 7)
    position = log.position()  # the checkpoint of turn 7: 7 turns and 2 evaluations
    write_turns(log, 8, 10)
    log.close()
    monkeypatch.setattr(wandb.Run, "starting_step", delivered)
    with open_log(tmp_path, config, position)[0] as log:
        write_turns(log, 8, 12)
    (run,) = offline_runs(wandb, tmp_path)
    assert run.rows == logged(tmp_path)[delivered:] and len(run.rows) == 16 - delivered


def test_wandb_without_a_network_has_the_whole_run_in_its_newest_folder(wandb, tmp_path):
    config = make_config(wandb="tango")
    log, said = open_log(tmp_path, config)
    write_turns(log, 1, 4)
    position = log.position()
    (folder,) = tmp_path.glob("wandb/offline-run-*")
    assert f"W&B: offline in {folder}\n" in said.getvalue()
    end(wandb)
    log, _ = open_log(tmp_path, config, position)
    write_turns(log, 5, 6)
    log.close()
    first, second = offline_runs(wandb, tmp_path)
    assert second.rows == logged(tmp_path) and len(second.rows) == 8
    assert first.run.run_id == second.run.run_id


def test_wandb_is_told_what_run_it_is(wandb, tmp_path):
    config = make_config(wandb="tango")
    with pytest.raises(FloatingPointError), open_log(tmp_path, config)[0]:
        raise FloatingPointError
    (first,) = offline_runs(wandb, tmp_path)
    assert first.exit_code == 1
    assert (first.run.project, first.run.job_type) == ("tango", "rl")
    assert first.run.display_name == "last_letter tango seed 0"
    assert first.config["generator.row_buckets"] == [80]
    (tmp_path / "sft").mkdir()
    with RunLog(tmp_path / "sft", config, Console(stream=io.StringIO()), 0, stage="sft verifier") as log:
        log.write(3, "sft", {"verifier/sft_loss": 0.5})
    (second,) = offline_runs(wandb, tmp_path / "sft")
    assert second.run.run_id != first.run.run_id
    assert second.run.display_name == "last_letter tango seed 0 sft verifier"
    assert second.rows == [(0, {"step": 3, "phase": "sft", "verifier/sft_loss": 0.5})]


def test_what_wandb_refuses_is_one_line(wandb, monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(ValueError, match=r"^loggers\.wandb=tango: W&B did not start \(No API key config.*\): run `wan"):
        open_log(tmp_path, make_config(wandb="tango"))


def kill_wandb() -> None:
    """End the library's process, as a full memory would."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"wandb-core" in (stat.parent / "cmdline").read_bytes():
                os.kill(int(stat.parent.name), signal.SIGKILL)


def test_a_logger_that_breaks_does_not_end_the_run(wandb, tmp_path):
    config = make_config(wandb="tango")
    log, said = open_log(tmp_path, config)
    kill_wandb()
    # The first rows may still go into the pipe.
    wait_for(lambda: write_turns(log, 1, 1) or "now off" in said.getvalue(), "the end of W&B")
    num_rows = len(read_metrics(tmp_path / "metrics.jsonl"))
    write_turns(log, 2, 4)
    position = log.position()
    log.close()
    assert said.getvalue().count("warning: logging to W&B failed and is now off (") == 1
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1] * num_rows + [2, 3, 3, 4]
    end(wandb)
    open_log(tmp_path, config, position)[0].close()
    assert offline_runs(wandb, tmp_path)[-1].rows == logged(tmp_path)


# ------------------------------------------------------------------------------------------------- TensorBoard


def events(folder: Path) -> list[tuple[str, int, float]]:
    """(name, step, value) of every scalar in the event files, which are TFRecords; fails unless there is one file."""
    from tensorboardX.proto.event_pb2 import Event

    (path,) = folder.iterdir()
    data, position, found = path.read_bytes(), 0, []
    while position < len(data):
        (length,) = struct.unpack_from("<Q", data, position)
        event = Event.FromString(data[position + 12 : position + 12 + length])
        found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
        position += 16 + length
    return found


def test_what_a_role_samples_for_the_other_is_a_curve_of_its_own():
    row = {"step": 3, "phase": "verifier", "verifier/length_mean": 5.0, "generator/length_mean": 9.0,
           "generator/kl": 0.1}
    assert list(_names_apart(row)) == ["step", "phase", "verifier/length_mean", "verifier_turn/generator/length_mean",
                                       "generator/kl"]
    assert "generator_turn/verifier/length_mean" in _names_apart(row | {"phase": "generator"})


def test_tensorboard_has_every_row_once_after_a_kill(tmp_path):
    pytest.importorskip("tensorboardX", reason="the TensorBoard logger's package is optional")
    config = make_config(tensorboard=True)
    log, _ = open_log(tmp_path, config)
    write_turns(log, 1, 4)
    position = log.position()
    # Its thread may not have taken all rows yet; those that a kill loses are written anew by the resumed run.
    wait_for(lambda: events(tmp_path / "tensorboard"), "rows in the event file")
    write_turns(log, 5, 6)
    with open_log(tmp_path, config, position)[0] as log:
        write_turns(log, 5, 7)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    expected = [
        (name, row["step"], pytest.approx(value))
        for row in rows for name, value in followed(row).items() if name not in ("step", "phase")
    ]
    assert events(tmp_path / "tensorboard") == expected
    steps = [(step, name) for name, step, _ in expected]
    assert len(set(steps)) == len(steps)  # a turn and its evaluation have no curve in common
    assert {"generator/accuracy", "generator/kl", "time/turn_s", "eval/time/turn_s"} <= {name for _, name in steps}


# ------------------------------------------------------------------------------------------- alarms, processes


def alarming_turns(log: RunLog, first: int, last: int) -> None:
    """The KL is 0.9 in turns 4 to 9, so its mean over 5 turns is above 0.5 in turns 6 to 11, with 2 * 0.02 in it."""
    for step in range(first, last + 1):
        log.write(step, "generator", {"generator/kl": 0.9 if 4 <= step <= 9 else 0.02 * (step > 1)})
        log.write(step, "eval", {"generator/accuracy": 0.5})


def test_a_resumed_run_rings_the_same_alarms(tmp_path):
    log, whole = open_log(tmp_path / "whole", default_config())
    alarming_turns(log, 1, 14)
    log, before = open_log(tmp_path / "resumed", default_config())
    alarming_turns(log, 1, 7)
    position = log.position()
    alarming_turns(log, 8, 9)
    log, after = open_log(tmp_path / "resumed", default_config(), position)
    alarming_turns(log, 8, 14)
    assert (tmp_path / "resumed/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()
    goes_on = "alarms still active from before: generator/kl\n"
    assert before.getvalue() + after.getvalue() == whole.getvalue().replace("\n", f"\n{goes_on}", 1)
    rows = read_metrics(tmp_path / "whole/metrics.jsonl")
    assert [row["step"] for row in rows if row.get("alarm/generator/kl")] == list(range(6, 12))
    assert [row["step"] for row in rows if row.get("alarm/generator/kl") == 0] == [12]  # where it is over
    assert not any(name.startswith("alarm/") for row in rows if row["phase"] == "eval" for name in row)
    start, end = whole.getvalue().splitlines()
    assert start.startswith("alarm generator/kl (turn 6): the KL of the generator to its reference is 0.548 nats")
    assert end == "alarm generator/kl is over (turn 12; it began at turn 6)"


def test_only_the_first_process_logs(monkeypatch, tmp_path):
    monkeypatch.setattr(hosts, "is_first", lambda: False)
    with open_log(tmp_path, make_config(wandb="tango", tensorboard=True))[0] as log:
        write_turns(log, 1, 3)
        assert log.position() == 0
    assert list(tmp_path.iterdir()) == []
