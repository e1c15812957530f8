"""`python -m tango_jax.evaluate` with a tiny model of random weights: every set, a kill, two processes, a workdir."""

import dataclasses
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from support.evaluation_cases import FILES, ROWS, files_of, sets_flag
from support.paths import ROOT
from support.processes import finish, wait_for
from support.tiny_checkpoints import MODEL, save_run, write_tiny_folder
from support.xla_settings import on_devices
from tango_jax.cli.command_line import load_config
from tango_jax.evaluate import main
from tango_jax.runtime.hosts import PREEMPTED

SHORT = ["--template=last_letter", "--verifier_template=last_letter", "--max_new=8", "--verifier_max_new=8",
         "--max_prompt=250", "--verifier_max_prompt=250", "--samples=2", "--rows=2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model of one layer: every process traces its samplers, and compiles each layer by itself."""
    return write_tiny_folder(tmp_path_factory.mktemp("hf") / "model", dataclasses.replace(MODEL, num_layers=1))


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict:
    """One device, and one compile cache for all processes."""
    return on_devices(1) | {"HOME": str(tmp_path_factory.mktemp("home"))}


def start(environment, *arguments, **more) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "tango_jax.evaluate", *map(str, arguments)], cwd=ROOT, text=True,
                            env=environment | more, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.fixture(scope="module")
def whole(folder, environment, tmp_path_factory) -> tuple[list, Path]:
    """Every set, its own last_letter and ProcessBench; the model judges itself."""
    out = tmp_path_factory.mktemp("whole")
    steps = ROWS / "processbench.jsonl"
    sets = f"{sets_flag()},last_letter,last_letter_steps,processbench_omnimath:{steps},processbench_gsm8k:{steps}"
    flags = [f"--checkpoint={folder}", f"--verifier={folder}", f"--sets={sets}", "--problems=3", "--shard=2", *SHORT]
    done = finish(start(environment, *flags, f"--out={out}"))
    assert done.code == 0, done.stderr
    assert "best of n, verdict" in done.stdout and "tables.md" in done.stdout
    return flags, out


@pytest.mark.long
def test_every_set_goes_through_the_sampler(whole):
    _, out = whole
    names = [*FILES, "last_letter", "last_letter_steps", "processbench_omnimath", "processbench_gsm8k"]
    assert {path.stem for path in (out / "rows").iterdir()} == set(names)
    for name in names:
        rows = [json.loads(line) for line in (out / f"rows/{name}.jsonl").read_text().splitlines()]
        assert rows and all(len(row["verifications"]) == 1 for row in rows)
        if name in FILES:
            assert len({row["number"] for row in rows}) * 3 == len(rows)  # greedy and two samples
            assert all(row["num_tokens"] > 0 or row["is_too_long"] for row in rows)
            texts = {row["text"] for row in rows if row["sample"] >= 0 and not row["is_too_long"]}
            assert len(texts) != 1  # samples differ
    page = (out / "tables.md").read_text()
    assert all(f" {name} |" in page for name in names)


@pytest.mark.long
def test_a_kill_changes_nothing(whole, environment, tmp_path):
    """Killed while it solves, told to stop while it judges."""
    flags, wanted = whole
    for number, awaited, code in (
        (signal.SIGKILL, "parts/*/solved-00001.jsonl", -signal.SIGKILL),
        (signal.SIGTERM, "parts/*/judged-00001.jsonl", PREEMPTED),
    ):
        process = start(environment, *flags, f"--out={tmp_path}")
        wait_for(lambda awaited=awaited: any(tmp_path.glob(awaited)), awaited, process)
        process.send_signal(number)
        done = finish(process)
        assert done.code == code, done.stderr
        assert not (tmp_path / "tables.md").exists()
    before = {name: content for name, content in files_of(tmp_path).items() if name.endswith(".jsonl")}
    done = finish(start(environment, *flags, f"--out={tmp_path}"))
    assert done.code == 0, done.stderr
    after = files_of(tmp_path)
    assert before and before.items() <= after.items() and after == files_of(wanted)


@pytest.mark.long
@pytest.mark.release
def test_two_processes_share_the_work(whole, environment, tmp_path):
    """The same files as one process writes, though each solves and judges other shards; the first writes the tables."""
    flags, wanted = whole
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    together = {"JAX_COORDINATOR_ADDRESS": f"localhost:{port}", "JAX_NUM_PROCESSES": "2"}
    processes = [start(environment, *flags, f"--out={tmp_path}", **together, JAX_PROCESS_ID=str(index))
                 for index in range(2)]
    first, second = [finish(process) for process in processes]
    assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
    assert "tables.md" in first.stdout and "machine:" not in second.stdout
    found, expected = files_of(tmp_path), files_of(wanted)
    assert found == expected


@pytest.mark.long
@pytest.mark.parametrize("task, sizes", [("last_letter", "test_words"), ("state_tracking", "test_swaps")])
def test_a_workdir_brings_its_settings_and_judges_itself(tmp_path, monkeypatch, task, sizes):
    folder, config = write_tiny_folder(tmp_path / "model"), load_config(str(ROOT / "configs/tiny.py"))
    config.task.name = task
    for role in (config.generator, config.verifier):
        role.checkpoint, role.max_prompt, role.max_response = str(folder), 128, 8
    config.task[sizes] = (2, 3)
    save_run(tmp_path / "run", config)
    monkeypatch.setattr("tango_jax.cli.session.configure", lambda config: None)
    main([f"--checkpoint={tmp_path / 'run'}", f"--sets={task},{task}_steps", "--problems=2", "--rows=2",
          f"--out={tmp_path / 'out'}"])
    rows = [json.loads(line) for line in (tmp_path / f"out/rows/{task}.jsonl").read_text().splitlines()]
    assert all(2 <= row["size"] <= 3 and row["num_tokens"] <= 8 and not row["verifications"] for row in rows)
    assert json.loads((tmp_path / "out/settings.json").read_text())["checkpoint_step"] == 1
