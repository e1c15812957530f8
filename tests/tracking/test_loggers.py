"""The log of a run: what follows metrics.jsonl has every row once, however often the run was killed and resumed."""

import io
import struct
import sys
import types
from pathlib import Path

import pytest

from support.paths import ROOT
from support.processes import wait_for
from tango_jax.cli.command_line import load_config
from tango_jax.cli.validation import validate
from tango_jax.config import default_config
from tango_jax.runtime import hosts
from tango_jax.runtime.console import Console
from tango_jax.tracking.loggers import RunLog, check_installed
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
                                      "time/turn_s": 1.5})  # fmt: skip
        if step % every == 0:
            log.write(step, "eval", {"generator_step": step, "generator/accuracy": step / 10, "time/turn_s": 2.5,
                                     "not/finite": float("nan")})  # fmt: skip


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


# ---------------------------------------------------------------------------------- Weights & Biases, a stand-in


class WandbServer:
    """What W&B keeps: per run id its steps; and the library's rules as its documentation and release 0.31 have them."""

    def __init__(self, monkeypatch):
        self.steps: dict[str, dict[int, dict]] = {}
        self.is_offline, self.is_refusing = False, False
        self.runs: list[WandbRun] = []
        module = types.ModuleType("wandb")
        module.Error, module.init, module.Settings = RuntimeError, self.init, lambda **settings: settings
        monkeypatch.setitem(sys.modules, "wandb", module)

    def init(self, *, id, resume, dir, **settings):  # noqa: A002 (W&B's name)
        if self.is_refusing:
            raise RuntimeError("No API key\nconfigured.")
        assert resume == "allow" and Path(dir).is_dir()
        self.runs.append(WandbRun(self, id, settings))
        return self.runs[-1]


class WandbRun:
    """Rows wait here until they are delivered; a killed process delivers no more of them."""

    def __init__(self, server: WandbServer, run_id: str, settings: dict):
        self.server, self.run_id, self.settings = server, run_id, settings
        self.offline, self.url, self.dir = server.is_offline, "https://wandb/run", "folder/files"
        steps = {} if self.offline else server.steps.setdefault(run_id, {})
        self.starting_step = max(steps, default=-1) + 1
        self.step = 0  # what release 0.31 says until the first row is logged
        self.waiting, self.last_step, self.exit_code = [], self.starting_step - 1, None
        self.is_broken = False

    def define_metric(self, name, step_metric):
        assert (name, step_metric) == ("*", "step")

    def log(self, row, step, commit):
        if self.is_broken:
            raise ConnectionResetError("Connection lost")
        assert commit and step > self.last_step, "W&B ignores a step that is not above all before"
        self.waiting.append((step, row))
        self.last_step = step

    def deliver(self, count):
        self.server.steps[self.run_id] |= dict(self.waiting[:count])
        self.waiting = self.waiting[count:]

    def finish(self, exit_code):
        self.deliver(len(self.waiting))
        self.exit_code = exit_code


@pytest.fixture
def wandb(monkeypatch) -> WandbServer:
    return WandbServer(monkeypatch)


def followed(row: dict) -> dict:
    """What other loggers are told of a row: its finite values, and its seconds apart from those of the turn's row."""
    apart = ("time/turn_s", "generator_step") if row["phase"] == "eval" else ()
    return {"eval/" * (name in apart) + name: value for name, value in row.items() if value is not None}


@pytest.mark.parametrize("delivered", [0, 5, 9, 11], ids=["none", "few", "to the checkpoint", "more than are kept"])
def test_wandb_has_every_row_once_after_a_kill(wandb, tmp_path, delivered):
    config = make_config(wandb="tango")
    log, said = open_log(tmp_path, config)
    write_turns(log, 1, 7)
    position = log.position()  # the checkpoint of turn 7: 7 turns and 2 evaluations
    write_turns(log, 8, 10)
    wandb.runs[0].deliver(delivered)  # then the process is killed
    assert "W&B: https://wandb/run" in said.getvalue()

    with open_log(tmp_path, config, position)[0] as log:
        write_turns(log, 8, 12)
    first, second = wandb.runs
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert len(rows) == 12 + 4
    assert first.run_id == second.run_id and second.exit_code == 0
    assert wandb.steps == {first.run_id: {index: followed(row) for index, row in enumerate(rows)}}


def test_wandb_without_a_network_has_the_whole_run_in_its_newest_folder(wandb, tmp_path):
    wandb.is_offline, config = True, make_config(wandb="tango")
    log, said = open_log(tmp_path, config)
    write_turns(log, 1, 4)
    position = log.position()
    assert "W&B: offline in folder\n" in said.getvalue()
    log, _ = open_log(tmp_path, config, position)
    write_turns(log, 5, 6)
    assert wandb.runs[1].waiting == list(enumerate(map(followed, read_metrics(tmp_path / "metrics.jsonl"))))


def test_wandb_is_told_what_run_it_is(wandb, tmp_path):
    config = make_config(wandb="tango")
    with pytest.raises(FloatingPointError), open_log(tmp_path, config)[0]:
        raise FloatingPointError
    run = wandb.runs[0]
    assert run.exit_code == 1
    assert (run.settings["project"], run.settings["name"], run.settings["job_type"]) == (
        "tango", "last_letter tango seed 0", "rl",
    )  # fmt: skip
    assert run.settings["config"]["generator.row_buckets"] == [80]
    with RunLog(tmp_path / "sft", config, Console(stream=io.StringIO()), 0, stage="sft verifier") as log:
        log.write(3, "sft", {"verifier/sft_loss": 0.5})
    assert wandb.runs[1].run_id != run.run_id
    assert wandb.runs[1].settings["name"] == "last_letter tango seed 0 sft verifier"
    assert wandb.steps[wandb.runs[1].run_id] == {0: {"step": 3, "phase": "sft", "verifier/sft_loss": 0.5}}


def test_what_wandb_refuses_is_one_line(wandb, tmp_path):
    wandb.is_refusing = True
    with pytest.raises(ValueError, match=r"^loggers\.wandb=tango: W&B did not start \(No API key configured\.\): run"):
        open_log(tmp_path, make_config(wandb="tango"))


def test_a_logger_that_breaks_does_not_end_the_run(wandb, tmp_path):
    config = make_config(wandb="tango")
    log, said = open_log(tmp_path, config)
    write_turns(log, 1, 1)
    wandb.runs[0].is_broken = True
    write_turns(log, 2, 4)
    position = log.position()
    log.close()
    warning = "warning: logging to W&B failed and is now off (ConnectionResetError: Connection lost);"
    assert said.getvalue().count(warning) == 1
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 3, 4]
    open_log(tmp_path, config, position)[0].close()
    assert [row["step"] for row in wandb.steps[wandb.runs[0].run_id].values()] == [1, 2, 3, 3, 4]


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
    ]  # fmt: skip
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


def test_only_the_first_process_logs(monkeypatch, wandb, tmp_path):
    monkeypatch.setattr(hosts, "is_first", lambda: False)
    with open_log(tmp_path, make_config(wandb="tango", tensorboard=True))[0] as log:
        write_turns(log, 1, 3)
        assert log.position() == 0
    assert list(tmp_path.iterdir()) == [] and wandb.runs == []
