"""`bench --check`: every step has a row whatever happens to others, files are readable at any moment, and wrong numbers
are found. The launcher runs all steps at their smallest sizes; elsewhere scripts stand in for them.
"""

import json
import math
import os
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support.launching import run
from support.paths import LAUNCH, ROOT
from support.processes import wait_for
from support.xla_settings import on_devices
from tango_jax import bench
from tango_jax.models import attention
from tango_jax.planning import device_check, device_parity, device_sizes
from tango_jax.planning.device_check import KINDS, Step, check_device, exit_code, markdown
from tango_jax.planning.device_steps import SIZES
from tango_jax.planning.targets import TARGETS, target_name

FACTS = {"what": "platform", "which": "cpu"}
COMPARED = {"what": "attention x", "largest": 0.5, "mean": 0.25, "unit": "nats", "allowed_largest": 0.1,
            "allowed_mean": None, "within": False}
SLEEP = "import time; time.sleep(10**6)"


def script(kind: str, title: str, code: str = "", rows: tuple = ()) -> Step:
    """A step that prints rows and then does what `code` says."""
    lines = [f"print({json.dumps(row)!r}, flush=True)" for row in rows]
    return Step(kind, title, (sys.executable, "-S", "-c", "\n".join([*lines, code])))


def run_scripts(monkeypatch, out, first: Step, later: list[Step], **changes) -> tuple[dict, list[str]]:
    monkeypatch.setattr(device_check, "steps_of", lambda size: [first, *later])
    options = {"kinds": KINDS, "size": "tiny", "minutes": 30.0} | changes
    said = []
    return check_device(out, log_fn=said.append, **options), said


def test_a_step_that_fails_is_a_row_and_the_next_ones_go_on(monkeypatch, tmp_path):
    later = [
        script("parity", "numbers", rows=(COMPARED, {"what": "attention y", "error": "TypeError: a | b"})),
        script("quickstart", "raises", "raise ValueError('no room')", rows=({"phase": "Compiling", "seconds": 2.5},)),
        script("quickstart", "aborts", "import os; os.kill(os.getpid(), 6)"),
        script("quickstart", "tells why", "print('{\"half a'); raise SystemExit(3)", rows=({"failed": "OSError: it"},)),
        script("quickstart", "goes on", rows=({"phase": "decode", "seconds": 2.0},)),
    ]
    report, said = run_scripts(monkeypatch, tmp_path, script("devices", "devices", rows=(FACTS,)), later)
    steps = {step["title"]: step for step in report["steps"]}
    assert {title: step["status"] for title, step in steps.items()} == {
        "devices": "done", "numbers": "done", "raises": "failed", "aborts": "failed", "tells why": "failed",
        "goes on": "done",
    }
    assert steps["raises"]["error"] == "exit code 1: ValueError: no room" and len(steps["raises"]["rows"]) == 1
    assert steps["aborts"]["error"] == "killed by SIGABRT" and steps["tells why"]["error"] == "OSError: it"
    assert said[3].endswith("done; 1 comparisons, 1 outside of what is allowed; 1 failed: TypeError: a | b")
    assert exit_code(report) == 1
    written = json.loads((tmp_path / "check.json").read_text())
    assert written["steps"] == report["steps"]
    text = (tmp_path / "check.md").read_text()
    assert "| attention x | 0.5 | 0.25 | nats | 0.1 |  | NO |  |" in text
    assert r"| attention y |  |  |  |  |  |  | TypeError: a \| b |" in text
    assert f"| raises | {steps['raises']['seconds']:.0f} | failed; exit code 1: ValueError: no room |" in text
    assert "| phase | seconds |\n| --- | --- |\n| decode | 2 |" in text


def test_only_some_steps(monkeypatch, tmp_path):
    """The devices are always listed."""
    later = [script("parity", "left out"), script("quickstart", "chosen")]
    first = script("devices", "devices", rows=(FACTS,))
    report, _ = run_scripts(monkeypatch, tmp_path, first, later, kinds=("quickstart",))
    assert [step["title"] for step in report["steps"]] == ["devices", "chosen"]
    assert exit_code(report) == 0


def test_what_does_not_end_is_cut_off(monkeypatch, tmp_path):
    later = [script("parity", "never begun")]
    report, _ = run_scripts(monkeypatch, tmp_path, script("devices", "hangs", SLEEP), later, minutes=0.01)
    assert [(step["status"], step["error"].split(" of --")[0]) for step in report["steps"]] == [
        ("cut off", "after 1 s, when the minutes"), ("not begun", "the 0.01 minutes")]
    assert exit_code(report) == 1


KILLED = """
import json, os, sys, time
from pathlib import Path
from tango_jax.planning import device_check
code = "import json, os, time; print(json.dumps({'what': 'pid', 'which': os.getpid()}), flush=True); {sleep}"
steps = [step._replace(command=(sys.executable, "-S", "-c", code)) for step in device_check.steps_of("tiny")]
device_check.steps_of = lambda size: steps
device_check.check_device(Path({out!r}), device_check.KINDS, "tiny", 30.0)
"""


def test_a_killed_check_leaves_what_it_had(tmp_path):
    code = KILLED.replace("{sleep}", SLEEP).replace("{out!r}", repr(str(tmp_path)))
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
                               text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    page = tmp_path / "check.md"
    wait_for(lambda: page.exists() and "| pid | " in page.read_text(), "a row", process)
    process.kill()
    process.communicate()
    report = json.loads((tmp_path / "check.json").read_text())
    [row] = report["steps"][0]["rows"]
    os.kill(row["which"], signal.SIGKILL)  # this stand-in does not watch for the end of its parent
    assert report["steps"][0]["status"] == "running"
    assert {step["status"] for step in report["steps"][1:]} == {"not begun"} and len(report["steps"]) == len(KINDS)
    assert "| the quickstart, shortened | 0 | not begun |" in page.read_text()


@pytest.mark.long
def test_all_steps_at_their_smallest_sizes(tmp_path):
    """By the launcher, as a user starts it."""
    quick = {name: on_devices(1)[name] for name in ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")}
    done = run(["bash", LAUNCH / "check_device.sh", "--size=tiny", f"--out={tmp_path}"], **quick)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "check.json").read_text())
    assert [step["kind"] for step in report["steps"]] == [
        "devices", "parity", "sizes", "quickstart", "smollm2"]
    assert all(step["status"] == "done" and step["rows"] for step in report["steps"])
    facts = {row["what"]: row["which"] for row in report["steps"][0]["rows"]}
    assert facts["platform"] == "cpu" and "hosts" not in facts
    compared = [row["what"] for row in report["steps"][1]["rows"] if "within" in row]
    assert len(compared) == 13 and "sampler against trainer, int8 weights" in compared
    left_out = {row["what"]: row["left_out"] for row in report["steps"][1]["rows"] if "left_out" in row}
    assert left_out.keys() == {f"attention {kind}" for kind in ("cudnn", "splash")} | {
        f"decode attention {kind}" for kind in ("cudnn", "paged")}
    assert left_out["attention cudnn"].endswith("=cudnn runs on a gpu, and the devices are of platform cpu")
    timed = [(row["what"].partition(" ")[0], row["plan"], row["seconds"] > 0) for row in report["steps"][2]["rows"]]
    names = ("prefill", "decode", "score", "update", "prefill", "decode")
    assert timed == [(name, None, True) for name in names]  # no plan knows this device
    assert {"sample", "update"} <= {row["generator's turn"] for row in report["steps"][3]["rows"]}
    assert report["steps"][4]["rows"] == [{"left_out": "TANGO_SMOLLM2 names no .gguf file of SmolLM2-135M-Instruct"}]
    text = (tmp_path / "check.md").read_text()
    assert text == markdown(report) and "## the quickstart, shortened\n" in text


# ----------------------------------------------------------------------------------------------- wrong numbers


def test_wrong_attention_is_found(monkeypatch):
    sizes = SIZES["tiny"].parity
    real_fn = attention.attend

    def sees_the_future(q, k, v, mask):
        return real_fn(q, k, v, jnp.ones_like(mask) if q.dtype == jnp.bfloat16 else mask)

    monkeypatch.setattr(attention, "attend", sees_the_future)
    rows = list(device_parity.attention_rows("attention xla", "xla", sizes))
    assert len(rows) == 2 and not any(row["within"] for row in rows)


def test_differences_by_hand():
    allowed = device_parity.Allowed(0.1, math.inf, "of the largest number")
    pairs = [(np.array([1.0, 2.0]), np.array([1.0, 2.5])), (np.array([10.0]), np.array([10.0]))]
    found = device_parity.row("x", pairs, allowed)
    assert (found["largest"], found["within"]) == (pytest.approx(0.5 / 2.5), False)
    assert found["mean"] == pytest.approx(0.2 / 3)
    in_nats = device_parity.row("x", pairs[:1], allowed._replace(unit="nats", largest=1.0))
    assert (in_nats["largest"], in_nats["mean"], in_nats["within"]) == (0.5, 0.25, True)
    assert not device_parity.row("x", [(np.array([np.nan]), np.array([1.0]))], allowed)["within"]


def test_a_comparison_that_cannot_be_made_is_a_row(monkeypatch):
    def fails(*arguments):
        raise TypeError("no such\nkernel")

    sizes = SIZES["tiny"].parity
    monkeypatch.setattr(device_parity, "cases", lambda sizes: [
        device_parity.Case("first", fails), device_parity.Case("second", lambda: iter([{"what": "second"}]))])
    assert list(device_parity.comparisons(sizes)) == [
        {"what": "first", "error": "TypeError: no such kernel"}, {"what": "second"}]


# ------------------------------------------------------------------------------------------- targets and mistakes


def test_a_device_is_known_by_its_kind():
    assert target_name("NVIDIA H100 80GB HBM3") == "h100" and target_name("TPU v5p") == "tpu-v5p"
    assert target_name("NVIDIA H100 PCIe") is None
    kinds = [kind for target in TARGETS.values() for kind in target.kinds]
    assert len(set(kinds)) == len(kinds) and all(target.kinds for target in TARGETS.values())


@pytest.mark.parametrize("arguments, message", [
    (["--minutes=5"], "--minutes is an option of --check: add --check, or leave --minutes out"),
    (["--check", "--runs=3"], "--runs does not go with --check: leave one of them out"),
    (["--check", "--json"], "leave out --json"),
    (["--check", "--only=R1"], "--only=R1: choose from devices, parity, sizes, quickstart, smollm2"),
    (["--check", "--minutes=0"], "--minutes=0.0 must lie between 0.01 and "),
    (["--check", "--size=huge"], "huge"),
    (["--check", f"--out={LAUNCH / 'check_device.sh'}"], "is a file; name a folder"),
])
def test_mistakes_end_in_one_line(capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(bench, "check_device", None)
    with pytest.raises(SystemExit) as stopped:
        bench.main(arguments)
    assert stopped.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


def test_ctrl_c_leaves_what_was_measured(monkeypatch, tmp_path):
    def interrupts(line):
        if "which" in json.loads(line):
            raise KeyboardInterrupt
        return json.loads(line)

    monkeypatch.setattr(device_check, "_take", lambda entry, line: interrupts(line))
    with pytest.raises(SystemExit) as stopped:
        run_scripts(monkeypatch, tmp_path, script("devices", "devices", SLEEP, rows=(FACTS,)), [])
    assert stopped.value.code == 128 + signal.SIGINT
    [step] = json.loads((tmp_path / "check.json").read_text())["steps"]
    assert (step["status"], step["error"]) == ("cut off", "interrupted")


def test_a_known_device_is_set_beside_the_plan(monkeypatch):
    """By hand: the score of 4 x (16 + 9) tokens of this model takes `flops` / (share x 989e12) s on an H100."""
    sizes = SIZES["tiny"].timed
    monkeypatch.setattr(device_sizes, "target_name", lambda kind: "h100")
    monkeypatch.setattr(device_sizes, "sampling_seconds", lambda *arguments: (2.0, 1.0))
    monkeypatch.setattr(device_sizes, "score_seconds", lambda *arguments: 3.0)
    monkeypatch.setattr(device_sizes, "update_seconds", lambda *arguments: 4.0)
    rows = list(device_sizes.timed(sizes))
    assert [row["seconds"] for row in rows] == [2.0, 1.0, 3.0, 4.0, 2.0, 1.0]
    model = device_sizes.model_of(sizes, jax.devices()[0])
    assert (model.num_layers, model.width, model.vocab_size) == (1, 576, 64)
    assert rows[2]["what"] == "score of 100 tokens; 1 layers"
    reached = TARGETS["h100"].reached.likely
    # The layer's matrices and attention, and the head of 36 scored tokens in three bfloat16 products.
    matrices = 2 * 100 * (576 * 64 * (9 + 2 * 3) + 9 * 64 * 576 + 3 * 576 * 1536)
    pairs = 4 * 16 * 16 + 4 * (9 * 16 + 9 * 9)
    flops = matrices + 4 * pairs * 9 * 64 + 3 * 2 * 36 * 576 * 64
    assert rows[2]["plan"] == pytest.approx(flops / (reached.score * 989e12))
    assert all(row["of the plan"] == row["seconds"] / row["plan"] for row in rows)
    assert rows[5]["plan"] > rows[1]["plan"]  # more rows read more
