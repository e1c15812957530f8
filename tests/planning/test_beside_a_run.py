"""`plan --measured=RUN`: a finished run beside what is predicted for it."""

import json
import re
from pathlib import Path

import pytest

from support.paths import ROOT
from tango_jax import plan
from tango_jax.cli.command_line import load_config
from tango_jax.planning.assumed_lengths import Even
from tango_jax.planning.estimates import estimated_programs
from tango_jax.planning.job import sized_job
from tango_jax.planning.measured import PHASES, _lengths, beside, open_run
from tango_jax.planning.sources import plan_source
from tango_jax.planning.targets import TARGETS, machine_of, open_target
from tango_jax.planning.times import turn_times
from tango_jax.planning.workload import Lengths, response_lengths, update_workload
from tango_jax.runtime.process import cpu_model
from tango_jax.tracking.run_config import keep_config

LENGTHS = {"generator": Lengths(30, 20.0), "verifier": Lengths(40, 39.0)}


@pytest.fixture(autouse=True)
def known_rates(monkeypatch):
    monkeypatch.setattr("tango_jax.planning.targets.machine_rates", lambda: {"matmul_gflops": 100.0, "read_gb_s": 20.0})


def write_run(path: Path, times: dict[str, dict[str, float]], devices=None, cpu: str = "", more=None) -> Path:
    """The workdir of a run whose turns took these seconds, phase by phase, by the role that learned. `more`: metrics of
    every turn."""
    path.mkdir()
    keep_config(load_config(str(ROOT / "configs/tiny.py")), path / "config.json")
    facts = {"devices": devices or {"cpu": 1}, "cpu": cpu or cpu_model(), "processes": 1}
    (path / "provenance.json").write_text(json.dumps({"attempts": [facts], "files": {}}))
    told = {f"{role}/{name}": value for role, (longest, mean, *_) in LENGTHS.items()
            for name, value in (("length_max", longest), ("length_mean", mean))} | (more or {})
    rows = [{"step": 0, "phase": "eval"}]
    for role, phases in times.items():
        # The median of three turns is the second.
        rows += [{"step": 1, "phase": role, **told, **{f"time/{phase}_s": factor * spent for phase, spent in
                  phases.items()}} for factor in (0.5, 1.0, 30.0)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "summary.json").write_text("{}")
    return path


SLOW = {role: dict.fromkeys(PHASES, 0.5) for role in ("generator", "verifier")}


def test_judgements_of_judgements_are_sampled_and_not_trained_on(tmp_path):
    again = {"second_judgement/length_max": 10, "second_judgement/length_mean": 5.0}
    lengths = open_run(str(write_run(tmp_path / "run", SLOW, more=again))).lengths["verifier"]["verifier"]
    assert (lengths.mean, lengths.trained_mean) == ((39.0 + 5.0) / 2, 39.0)


def test_what_a_run_tells(tmp_path):
    run = open_run(str(write_run(tmp_path / "run", SLOW)))
    assert (run.target, run.devices, run.per_process) == ("cpu", 1, 1)
    assert run.turns == SLOW and run.lengths["verifier"] == LENGTHS
    assert response_lengths(Even(0.5), run.config, "generator", 3, LENGTHS["generator"]).tolist() == [30, 20, 10]
    assert response_lengths(Even(0.5), run.config, "generator", 3, None).tolist() == [32, 16, 1]  # as allowed


def test_predictions_are_those_of_the_run_and_its_lengths(tmp_path):
    """By the same arithmetic as any plan; the update is measured with its scores."""
    run = open_run(str(write_run(tmp_path / "run", SLOW)))
    found = {(one.role, one.phase): one for one in beside(run)}
    target = open_target("cpu", 1)
    models = {role: plan_source(run.config, role).model_config for role in SLOW}
    job = sized_job(run.config, models, machine_of("cpu", 1))
    programs = estimated_programs(job, "cpu")
    told, assumed = (turn_times(job, programs, target, "generator", Even(0.5), lengths).seconds
                     for lengths in (LENGTHS, {}))
    assert told["verify"] != assumed["verify"]
    quick, likely, slow = found["generator", "update"].predicted
    assert quick < likely < slow and likely == told["score"] + told["update"]
    assert found["generator", "verify"].predicted[1] == told["verify"]
    assert {one.measured for one in found.values()} == {0.5}


def likely(path: Path, **more: float) -> dict[tuple[str, str], float]:
    run = open_run(str(write_run(path, SLOW, more={name.replace("__", "/"): value for name, value in more.items()})))
    return {(one.role, one.phase): one.predicted[1] for one in beside(run)}


def test_only_what_a_run_judged_is_predicted(tmp_path):
    """Of eight solutions of a turn a quarter: two rows of the verifier, as in a run of one problem a turn."""
    whole, part = likely(tmp_path / "whole"), likely(tmp_path / "part", generator__judged_share=0.25)
    assert part["generator", "verify"] < whole["generator", "verify"]
    assert {one for one in whole if part[one] != whole[one]} == {("generator", "verify")}
    none = likely(tmp_path / "none", generator__judged_share=0.0)  # half of the turns, and yet some seconds
    assert none["generator", "verify"] <= part["generator", "verify"]


def test_only_the_second_tries_of_a_run_are_predicted(tmp_path):
    most = likely(tmp_path / "most", second_try__share=1.0)
    few = likely(tmp_path / "few", second_try__share=0.0)
    assert few["generator", "sample"] < most["generator", "sample"]
    assert few["generator", "update"] < most["generator", "update"]


def test_the_lengths_of_all_prompts_of_a_role_count(tmp_path):
    """First judgements have 39 tokens, second ones 1 or 39: the mean is 20 or 39."""
    short, even = (open_run(str(write_run(tmp_path / str(mean), SLOW, more={
        "second_judgement/length_mean": mean, "second_judgement/length_max": 39.0}))) for mean in (1.0, 39.0))
    assert [run.lengths["generator"]["verifier"].mean for run in (short, even)] == [20.0, 39.0]
    tried = open_run(str(write_run(tmp_path / "tried", SLOW, more={
        "second_try/length_mean": 8.0, "second_try/length_max": 32.0, "second_try/share": 0.5})))
    assert tried.lengths["generator"]["generator"][:2] == (32, pytest.approx(16.0))  # (20 + 8 / 2) / 1.5


def test_a_run_with_prompts_of_ones_own_is_refused(tmp_path):
    """Of the rewrites that are possible, an unknown part was sampled."""
    more = {"rewrite/length_mean": 200.0, "rewrite/length_max": 250.0}
    with pytest.raises(ValueError, match="has responses to rewrite, and --measured knows .* without prompts of your"):
        open_run(str(write_run(tmp_path / "run", SLOW, more=more)))


def test_every_batch_that_dynamic_sampling_drew_is_predicted(tmp_path):
    once = likely(tmp_path / "once")
    again = likely(tmp_path / "again", generator__batches_sampled=3.0, verifier__batches_sampled=2.0)
    ratios = {one: again[one] / once[one] for one in once}
    # The generator's turn lays out the weights of both roles and draws again only what it solves.
    assert 1 < ratios.pop(("generator", "reshard")) < 3
    assert ratios == pytest.approx({
        ("generator", "sample"): 3, ("generator", "verify"): 1, ("generator", "update"): 1, ("verifier", "reshard"): 2,
        ("verifier", "sample"): 2, ("verifier", "verify"): 2, ("verifier", "update"): 1})


def test_an_update_has_the_lengths_that_dynamic_sampling_chose(tmp_path):
    """Of several batches with a mean of 20 tokens, those chosen have 10: eight responses, in two minibatches."""
    more = {"generator/batches_sampled": 3.0, "generator/tokens": 80.0}
    run = open_run(str(write_run(tmp_path / "run", SLOW, more=more)))
    lengths = run.lengths["generator"]
    assert lengths["generator"] == Lengths(30, 20.0, batches=3.0, trained_tokens=80.0)
    assert lengths["verifier"].trained_tokens is run.lengths["verifier"]["generator"].trained_tokens is None
    run.config.generator.loss.minibatches = 2
    models = {role: plan_source(run.config, role).model_config for role in SLOW}
    job = sized_job(run.config, models, machine_of("cpu", 1))
    chosen, same = (update_workload(job, "generator", Even(0.5), told)
                    for told in (lengths, {"generator": Lengths(30, 10.0)}))
    assert run.config.rl.prompts_per_step * run.config.rl.samples_per_prompt == 8 and chosen == same
    assert chosen.useful < update_workload(job, "generator", Even(0.5), {"generator": Lengths(30, 20.0)}).useful
    masked = _lengths("generator", [{"generator/length_mean": 20.0, **more}], mask_overlong=True)
    assert masked["generator"].trained_tokens is None


def test_dynamic_sampling_reads_every_batch_and_trains_on_whole_texts():
    """A verifier that reads has counted eight marks among its tokens, in texts of 20 tokens."""
    config = load_config("tiny", ["arm=scored"])
    models = {role: plan_source(config, role).model_config for role in SLOW}
    job, target = sized_job(config, models, machine_of("cpu", 1)), open_target("cpu", 1)
    row = {f"{role}/length_{name}": 20.0 for role in SLOW for name in ("max", "mean")} | {"verifier/tokens_scored": 900}
    drawn = row | {"verifier/batches_sampled": 3.0, "verifier/tokens": 8.0}
    once, again = (turn_times(job, estimated_programs(job, "cpu"), target, "verifier", Even(0.5),
                              _lengths("verifier", [one])).seconds for one in (row, drawn))
    assert again["verify"] == pytest.approx(3 * once["verify"]) and again["sample"] == pytest.approx(3 * once["sample"])
    assert again["update"] == once["update"]
    written = {name: value for name, value in drawn.items() if name != "verifier/tokens_scored"}
    assert _lengths("verifier", [written])["verifier"].trained_tokens == 8.0


def test_the_commands(tmp_path, capsys):
    run = write_run(tmp_path / "run", SLOW)
    plan.main([f"--measured={run}"])
    shown = capsys.readouterr().out
    assert "likely / measured" in shown and f"{run} on 1 x cpu" in " ".join(shown.split())
    plan.main([f"--measured={run}", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (report["target"], report["devices"]) == ("cpu", 1)
    assert [(one["role"], one["phase"], one["measured"]) for one in report["phases"]] == [
        (role, phase, 0.5) for role in SLOW for phase in PHASES]


def damaged(path: Path, what: str) -> Path:
    run = write_run(path / "run", SLOW, {"NVIDIA B200": 8} if what == "a device" else None,
                    "A Processor" if what == "a cpu" else "")
    for name in {"metrics": ("metrics.jsonl",), "summary": ("summary.json",), "machine": ("provenance.json",)}.get(
            what, ()):
        (run / name).unlink()
    if what == "turns":
        (run / "metrics.jsonl").write_text('{"step": 0, "phase": "eval"}\n')
    return run


@pytest.mark.parametrize("what, message", [
    ("metrics", "has no metrics.jsonl and config.json: give the workdir of a finished run"),
    ("summary", "holds an unfinished run: it has no summary.json"),
    ("machine", "does not say on which machine it ran: it has no provenance.json"),
    ("turns", "has no turn of either role"),
    ("a device", "ran on 8 x NVIDIA B200 in 1 process(es), whose rates are unknown"),
    ("a cpu", "ran on a A Processor, and this machine has a"),
])
def test_a_run_that_tells_nothing_is_one_line(tmp_path, capsys, what, message):
    run = damaged(tmp_path, what)
    with pytest.raises(SystemExit) as stop:
        plan.main([f"--measured={run}"])
    told = capsys.readouterr().err + str(stop.value)
    assert stop.value.code == 2 and message in told and str(run) in told


@pytest.mark.parametrize("words, message", [
    (["--measured=RUN", "--target=h100:8"], "--measured stands alone or with --json: remove --target"),
    (["--measured", "RUN", "--target=h100:8"], "--measured stands alone or with --json: remove --target"),
    (["--measured="], "--measured needs the workdir of a finished run"),
    (["--measured=RUN", "--speed=2"], "--speed"),
])
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
