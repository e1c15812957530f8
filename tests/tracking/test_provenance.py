"""provenance.json: what a start of a run leaves in it, what a later start finds changed, and what is only told."""

import io
import json
import re

import pytest

from support.tiny_checkpoints import save_run
from tango_jax.config import default_config
from tango_jax.runtime import hosts
from tango_jax.runtime.console import Console
from tango_jax.runtime.user_code import source_digest
from tango_jax.tracking import provenance
from tango_jax.tracking.loggers import RunLog
from tango_jax.tracking.provenance import (
    begin,
    check_method,
    describe,
    method_digests,
    read_provenance,
    summary_of,
    weights_digest,
)

SILENT = Console(enabled=False)


@pytest.fixture
def config(tmp_path):
    """Two files of one name, and a template."""
    config = default_config()
    for role in ("generator", "verifier"):
        (tmp_path / role).mkdir()
        (tmp_path / role / "own.py").write_text(f"# of the {role}\ndef f(*records):\n    return 0.0\n")
        config[role].rewards = (f"{tmp_path / role / 'own.py'}:f",)
    (tmp_path / "template.txt").write_text("{problem}")
    config.generator.template = str(tmp_path / "template.txt")
    return config


def start(config, workdir, console: Console = SILENT) -> None:
    """A start of a run up to its first row."""
    with RunLog(workdir, config, console, resume_at=0, provenance=begin(config, workdir, console)) as log:
        log.write(0, "eval", {})


def test_files_of_one_name_are_copied_apart(config, tmp_path):
    start(config, tmp_path / "run")
    files = read_provenance(tmp_path / "run")["files"]
    assert set(files) == {"generator.rewards (f)", "verifier.rewards (f)", "generator.template"}
    for role in ("generator", "verifier"):
        entry = files[f"{role}.rewards (f)"]
        assert entry["sha256"] == source_digest(*config[role].rewards)
        assert re.fullmatch(r"user_files/[0-9a-f]{12}-own\.py", entry["copy"])
        assert (tmp_path / "run" / entry["copy"]).read_text().startswith(f"# of the {role}")
    assert method_digests(read_provenance(tmp_path / "run")) == {key: entry["sha256"] for key, entry in files.items()}
    assert method_digests(read_provenance(tmp_path)) == {} and describe({}) == [] and summary_of({}) == {"files": {}}


def test_a_file_that_passes_a_function_on_counts_with_the_one_that_defines_it(config, tmp_path):
    (tmp_path / "generator" / "passed_on_to_provenance.py").write_text("def f(*records):\n    return 0.0\n")
    (tmp_path / "generator" / "own.py").write_text("from passed_on_to_provenance import f\n")
    start(config, tmp_path / "run")
    key = "generator.rewards (f) (passed_on_to_provenance.py)"
    assert {"generator.rewards (f)", key} < set(method_digests(read_provenance(tmp_path / "run")))
    (tmp_path / "generator" / "passed_on_to_provenance.py").write_text("def f(*records):\n    return 1.0\n")
    with pytest.raises(ValueError, match=r"\(generator\.rewards \(f\) \(passed_on_to_provenance\.py\): .* has changed"):
        check_method(config, tmp_path / "run")


def test_a_start_that_does_nothing_leaves_nothing(config, tmp_path):
    begin(config, tmp_path / "run", SILENT)
    assert not (tmp_path / "run").exists()


def test_each_start_is_recorded_once(config, tmp_path):
    made = begin(config, tmp_path, SILENT)
    for _ in range(3):  # stage 1 of both roles, and stage 2
        made.keep(tmp_path)
    assert len(read_provenance(tmp_path)["attempts"]) == 1
    other = provenance.Provenance(made.facts | {"time": "2030-01-01T00:00:00+00:00"}, made.files)
    other.keep(tmp_path)
    assert [attempt["time"] for attempt in read_provenance(tmp_path)["attempts"]] == [
        made.facts["time"], "2030-01-01T00:00:00+00:00"
    ]


def test_of_several_processes_the_first_writes(config, tmp_path, monkeypatch):
    monkeypatch.setattr(hosts, "is_first", lambda: False)
    monkeypatch.setattr(hosts, "from_first", lambda value: "")  # the first process found no mistake
    start(config, tmp_path / "run")
    assert not (tmp_path / "run" / "provenance.json").exists() and not (tmp_path / "run" / "user_files").exists()


def test_an_edited_function_is_refused_once_something_depends_on_it(config, tmp_path):
    workdir, file = tmp_path / "run", tmp_path / "verifier" / "own.py"
    begin(config, workdir, SILENT).keep(workdir)
    file.write_text("def f(*records):\n    return 1.0\n")
    check_method(config, workdir)  # killed before its first row: nothing depends on it
    start(config, workdir)
    file.write_text("def f(*records):\n    return 2.0\n")
    with pytest.raises(ValueError, match=rf"\(verifier\.rewards \(f\): {file} has changed; .*/\w+-own\.py is a copy"):
        begin(config, workdir, SILENT)
    (workdir / "provenance.json").rename(workdir / "provenance.before.json")
    start(config, workdir)
    check_method(config, workdir)


def test_a_method_that_was_given_up_is_shown_and_counts(config, tmp_path):
    workdir, own = tmp_path / "run", tmp_path / "verifier" / "own.py"
    start(config, workdir)
    before = method_digests(read_provenance(workdir))
    for number in (1, 2):
        own.write_text(f"def f(*records):\n    return {number}.0\n")
        with pytest.raises(ValueError, match=rf"`mv {workdir}/provenance.json {workdir}/provenance.before.json`"):
            check_method(config, workdir)
        (workdir / "provenance.json").rename(workdir / "provenance.before.json")
        start(config, workdir)
    stored, digest = read_provenance(workdir), before["verifier.rewards (f)"]
    own_lines = [line for line in describe(stored) if "verifier.rewards (f): own.py, sha256" in line]
    assert [line[:8] for line in own_lines] == ["start 1:", "start 2:", "start 3:"] and digest[:12] in own_lines[0]
    start(config, tmp_path / "another")  # of the last method alone
    alone = method_digests(read_provenance(tmp_path / "another"))
    assert alone.items() < method_digests(stored).items()
    assert method_digests(stored)["verifier.rewards (f) before before"] == digest


def test_all_starts_are_described(config, tmp_path):
    made = begin(config, tmp_path, SILENT)
    for devices in ({"H100": 1}, {"H100": 1}, {"TPU v5e": 8}):
        facts = made.facts | {"devices": devices, "time": str(len(read_provenance(tmp_path).get("attempts", ())))}
        provenance.Provenance(facts, made.files).keep(tmp_path)
    first, *_, last = [line for line in describe(read_provenance(tmp_path)) if "jax" in line]
    assert first.startswith("start 1, 2: tango_jax") and "1 x H100 (cpu)" in first
    assert last.startswith("start 3: tango_jax") and "8 x TPU v5e (cpu)" in last


def test_weights_are_told_apart_by_what_they_hold(tmp_path):
    """And not by the last part of their path."""
    digests = {}
    for name, content in (("one", b"a"), ("two", b"b"), ("copy", b"a")):
        for kind in ("exported", "adapter"):
            folder = tmp_path / name / kind
            folder.mkdir(parents=True)
            (folder / "model.safetensors").write_bytes(content)
        config = default_config()
        config.generator.checkpoint = str(tmp_path / name / "exported")
        config.verifier.checkpoint, config.verifier.adapter = (
            str(tmp_path / "one" / "exported"), str(tmp_path / name / "adapter")
        )
        start(config, tmp_path / name / "run")
        [attempt] = read_provenance(tmp_path / name / "run")["attempts"]
        assert set(attempt["weights"]) == {"generator.checkpoint", "verifier.checkpoint", "verifier.adapter"}
        digests[name] = weights_digest(read_provenance(tmp_path / name / "run"))
    assert digests["one"] == digests["copy"] != digests["two"]
    assert weights_digest({"attempts": [{}], "files": {}}) == ""  # of an earlier version


def test_a_template_is_left_to_the_check_of_the_checkpoint(config, tmp_path):
    start(config, tmp_path / "run")
    before = method_digests(read_provenance(tmp_path / "run"))
    (tmp_path / "template.txt").write_text("{problem}?")
    start(config, tmp_path / "run")
    assert method_digests(read_provenance(tmp_path / "run")) != before


def test_other_versions_and_machines_are_told(config, tmp_path):
    start(config, tmp_path)
    stored = json.loads((tmp_path / "provenance.json").read_text())
    stored["attempts"][0] |= {"jax": "0.0.1", "devices": {"TPU v5e": 4}, "hosts": ["elsewhere"]}
    (tmp_path / "provenance.json").write_text(json.dumps(stored))
    stream = io.StringIO()
    now = f"jax {begin(config, tmp_path, Console(stream=stream)).facts['jax']}, devices 8 x cpu"
    told = " ".join(stream.getvalue().split())
    assert f"the last start of this run had jax 0.0.1, devices 4 x TPU v5e; it goes on with {now}" in told


def test_what_is_told_of_a_run(config, tmp_path):
    start(config, tmp_path / "run")
    stored = read_provenance(tmp_path / "run")
    first, *files = describe(stored)
    assert first.startswith("tango_jax 0.1.0") and f"jax {stored['attempts'][0]['jax']}" in first and "8 x cpu" in first
    digest = stored["files"]["generator.rewards (f)"]["sha256"]
    assert f"generator.rewards (f): own.py, sha256 {digest[:12]}" in files
    assert summary_of(stored)["files"]["generator.rewards (f)"] == digest


@pytest.mark.parametrize("content", ["{", "[]", '{"attempts": [], "files": {}}'])
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / "provenance.json").write_text(content)
    with pytest.raises(ValueError, match=r"provenance\.json (cannot be read|is damaged).*; restore it; if you delete"):
        read_provenance(tmp_path)


def test_one_policy_starts_from_the_generator_of_another_run(tmp_path):
    save_run(tmp_path / "first", default_config(), stage_one=True)  # of the generator alone
    config = default_config()
    config.arm = "self_verify"
    config.generator.checkpoint = config.verifier.checkpoint = str(tmp_path / "first")
    start(config, tmp_path / "run")
    [attempt] = read_provenance(tmp_path / "run")["attempts"]
    assert len(set(attempt["weights"].values())) == 1
