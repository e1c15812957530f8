"""`plan --measured=RUN` and `--shares=RUN`: a finished run beside what is predicted for it."""

import json
import re
from pathlib import Path

import pytest

from support.paths import ROOT
from tango_jax import plan
from tango_jax.cli.command_line import load_config
from tango_jax.planning import measured
from tango_jax.planning.measured import PHASES, beside, open_run
from tango_jax.planning.targets import TARGETS, Shares
from tango_jax.planning.times import turn_times
from tango_jax.planning.workload import Lengths, response_lengths
from tango_jax.runtime.process_facts import cpu_model
from tango_jax.tracking.run_config import keep_config

LENGTHS = {"generator": Lengths(30, 20.0), "verifier": Lengths(40, 39.0)}


@pytest.fixture(autouse=True)
def known_rates(monkeypatch):
    monkeypatch.setattr("tango_jax.planning.targets.machine_rates", lambda: {"matmul_gflops": 100.0, "read_gb_s": 20.0})


def write_run(path: Path, times: dict[str, dict[str, float]], devices=None, cpu: str = "") -> Path:
    """The workdir of a run whose turns took these seconds, phase by phase, by the role that learned."""
    path.mkdir()
    keep_config(load_config(str(ROOT / "configs/tiny.py")), path / "config.json")
    facts = {"devices": devices or {"cpu": 1}, "cpu": cpu or cpu_model(), "processes": 1}
    (path / "provenance.json").write_text(json.dumps({"attempts": [facts], "files": {}}))
    told = {f"{role}/{name}": value for role, (longest, mean) in LENGTHS.items()
            for name, value in (("length_max", longest), ("length_mean", mean))}  # fmt: skip
    rows = [{"step": 0, "phase": "eval"}]
    for role, phases in times.items():
        # The median of three turns is the second.
        rows += [{"step": 1, "phase": role, **told, **{f"time/{phase}_s": factor * spent for phase, spent in
                  phases.items()}} for factor in (0.5, 1.0, 30.0)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "summary.json").write_text("{}")
    return path


SLOW = {role: dict.fromkeys(PHASES, 0.5) for role in ("generator", "verifier")}


@pytest.fixture(scope="module")
def truth():
    """A machine that reaches a tenth of what is expected in sampling, and a fifth in updates."""
    patch = pytest.MonkeyPatch()
    patch.setattr("tango_jax.planning.targets.machine_rates", lambda: {"matmul_gflops": 100.0, "read_gb_s": 20.0})
    target = measured.open_target("cpu", 1)
    patch.undo()
    likely = measured.reached(target, 1).likely
    return Shares(likely.update / 5, likely.score / 5, likely.prefill / 10, likely.read / 10)


def test_what_a_run_tells(tmp_path):
    run = open_run(str(write_run(tmp_path / "run", SLOW)))
    assert (run.target, run.devices, run.per_process) == ("cpu", 1, 1)
    assert run.turns == SLOW and run.lengths["verifier"] == LENGTHS
    config = run.config.generator
    assert response_lengths(config, 3, 0.5, LENGTHS["generator"]).tolist() == [30, 20, 10]
    assert response_lengths(config, 3, 0.5, None).tolist() == [32, 16, 1]  # as allowed


def test_the_shares_that_a_machine_has_reached_are_found(tmp_path, truth):
    """From the seconds that it would take; a second plan with them predicts these seconds."""
    run = open_run(str(write_run(tmp_path / "run", SLOW)))
    job = beside(run)
    spent = measured._predicted(run, measured.job_of(run), job.target.with_shares(truth))
    found = beside(open_run(str(write_run(tmp_path / "other", spent))))
    for name in Shares._fields:
        assert getattr(found.reached.likely, name) == pytest.approx(getattr(truth, name), rel=1e-3), name
    for turn, phases in spent.items():
        for phase in ("sample", "verify", "update"):
            assert found.after[turn][phase] == pytest.approx(phases[phase], rel=1e-3)
            quick, likely, slow = found.predicted[turn][phase]
            assert quick <= likely <= slow and likely < phases[phase]
    assert found.reached.quick.update == pytest.approx(found.reached.slow.update, rel=1e-2)  # all phases agree


def test_the_interval_of_a_run_is_that_of_its_phases(tmp_path):
    """Updates of one role twice as long as foreseen, of the other half as long: the shares of both bound the next."""
    run = open_run(str(write_run(tmp_path / "run", SLOW)))
    found = beside(run)
    ratios = [found.after[turn]["update"] / 0.5 for turn in SLOW]
    assert min(ratios) < 1 < max(ratios)
    reached = found.reached
    assert reached.quick.update / reached.likely.update == pytest.approx(max(ratios), rel=1e-6)
    assert reached.slow.update / reached.likely.update == pytest.approx(min(ratios), rel=1e-6)
    assert sum(found.after[turn]["update"] for turn in SLOW) == pytest.approx(1.0, rel=1e-3)


def test_lengths_of_a_run_count(tmp_path):
    run = open_run(str(write_run(tmp_path / "run", SLOW)))
    target, job = measured.open_target("cpu", 1), measured.job_of(run)
    programs = measured.programs_of(job, target)
    told, assumed = (turn_times(job, programs, target, "generator", 0.5, lengths).seconds["verify"]
                     for lengths in (LENGTHS, {}))  # fmt: skip
    assert told != assumed


def test_the_commands(tmp_path, capsys):
    run = write_run(tmp_path / "run", SLOW)
    plan.main([f"--measured={run}"])
    shown = capsys.readouterr().out
    assert "with its shares" in shown and f"--shares={run} plans with them" in shown
    plan.main([f"--measured={run}", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["measured_seconds"] == SLOW and set(report["shares"]) == set(Shares._fields)
    asked = plan.parse_options(["--config=tiny", f"--shares={run}"])
    assert asked.options.target.reached.likely.update == pytest.approx(report["shares"]["update"])
    assert f"as {run} has reached" in asked.options.target.reached.basis


def damaged(path: Path, what: str) -> Path:
    run = write_run(path / "run", SLOW, {"NVIDIA B200": 8} if what == "a device" else None,
                    "A Processor" if what == "a cpu" else "")  # fmt: skip
    for name in {"metrics": ("metrics.jsonl",), "summary": ("summary.json",), "machine": ("provenance.json",)}.get(
            what, ()):
        (run / name).unlink()
    if what == "turns":
        (run / "metrics.jsonl").write_text('{"step": 0, "phase": "eval"}\n')
    return run


@pytest.mark.parametrize("what, message", [
    ("metrics", "has no metrics.jsonl and config.json: give the workdir of a finished run"),
    ("summary", "holds a run that has not ended: it has no summary.json"),
    ("machine", "does not say on what it ran: it has no provenance.json"),
    ("turns", "has no turn of either role"),
    ("a device", "ran on 8 x NVIDIA B200 in 1 process(es), whose rates are unknown"),
    ("a cpu", "ran on a A Processor, and this machine has a"),
])  # fmt: skip
def test_a_run_that_tells_nothing_is_one_line(tmp_path, capsys, what, message):
    run = damaged(tmp_path, what)
    with pytest.raises(SystemExit) as stop:
        plan.main([f"--measured={run}"])
    told = capsys.readouterr().err + str(stop.value)
    assert stop.value.code == 2 and message in told and str(run) in told


@pytest.mark.parametrize("words, message", [
    (["--target=h100:8", "--config=tiny", "--shares=RUN"], "ran on cpu, and --target is h100: give --target=cpu"),
    (["--measured=RUN", "--target=h100:8"], "--measured stands alone or with --json: remove --target"),
    (["--measured=RUN", "--published"], "--measured stands alone or with --json: remove --published"),
    (["--measured", "RUN", "--target=h100:8"], "--measured stands alone or with --json: remove --target"),
    (["--measured="], "--measured needs the workdir of a finished run"),
    (["--published", "--speed=2"], "--speed"),
])  # fmt: skip
def test_mistakes_on_the_command_line(tmp_path, capsys, words, message):
    run = write_run(tmp_path / "run", SLOW)
    with pytest.raises(SystemExit) as stop:
        plan.main([word.replace("RUN", str(run)) for word in words])
    assert re.search(re.escape(message), capsys.readouterr().err + str(stop.value))


@pytest.mark.parametrize("kind, name", [(kind, target.name) for target in TARGETS.values() for kind in target.kinds])
def test_devices_by_the_names_that_jax_gives_them(tmp_path, kind, name):
    run = open_run(str(write_run(tmp_path / "run", SLOW, {kind: 4})))
    assert (run.target, run.devices) == (name, 4)


@pytest.mark.parametrize("kind", ["NVIDIA GH200 480GB", "NVIDIA H100 PCIe", "TPU v5x"])
def test_a_device_whose_name_is_like_another_is_unknown(tmp_path, kind):
    with pytest.raises(ValueError, match=f"ran on 4 x {kind} in 1 process.*whose rates are unknown"):
        open_run(str(write_run(tmp_path / "run", SLOW, {kind: 4})))


def test_a_run_that_was_continued_on_other_devices_tells_nothing(tmp_path):
    run = write_run(tmp_path / "run", SLOW, {"NVIDIA H100 80GB HBM3": 8})
    stored = json.loads((run / "provenance.json").read_text())
    [last] = stored["attempts"]
    stored["attempts"].insert(0, last | {"devices": {"NVIDIA H100 80GB HBM3": 1}})
    (run / "provenance.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=re.escape("ran on 1 x NVIDIA H100 80GB HBM3 in 1 process(es), then on 8 x ")):
        open_run(str(run))
    stored["attempts"][0] = last  # continued where it began
    (run / "provenance.json").write_text(json.dumps(stored))
    assert open_run(str(run)).devices == 8
