"""What the surroundings break ends with one line, and a mistake of the program's own with its traceback."""

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import pytest

from support.paths import ROOT
from tango_jax.cli import session as runtime
from tango_jax.config import default_config
from tango_jax.runtime import failures, hosts, termination
from tango_jax.runtime.console import Console
from tango_jax.tracking.loggers import RunLog
from tango_jax.tracking.metrics import MetricsWriter, read_metrics


def end_of(error: BaseException, workdir, monkeypatch) -> str:
    """The last line of a command in which this is raised."""
    monkeypatch.setattr(runtime, "configure", lambda config: "")
    with pytest.raises(SystemExit) as stopped, runtime.session(default_config(), workdir):
        raise error
    return str(stopped.value)


def full_disk(path) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG, errno.EMFILE])
def test_a_disk_that_fails_is_one_line_with_the_file(number, tmp_path, monkeypatch):
    message = end_of(OSError(number, os.strerror(number), "runs/x/summary.json"), tmp_path, monkeypatch)
    assert message.startswith(f"error: runs/x/summary.json: {os.strerror(number)} (") and "\n" not in message
    assert message.endswith(f"What is saved in {tmp_path} is kept: the same command resumes from there")


@pytest.mark.parametrize("error, part", [
    (OSError(errno.ENOSPC, "No space left on device"), "session.py, session: No space left"),
    (OSError("no number"), "error: no number"),
    (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nmore\nlines"),
     "RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."),
    (jax.errors.JaxRuntimeError("INTERNAL: a driver fails\nmore"), "INTERNAL: a driver fails (in "),
    (MemoryError(), "out of memory"),
    (RuntimeError("the math grader cannot start: no module\nmath_verify"), "the math grader cannot start"),
    (FloatingPointError("nan"), "error: nan"),
    (ValueError("two\nlines"), "error: two lines"),
])
def test_errors_of_libraries_and_users_are_one_line(error, part, tmp_path, monkeypatch):
    message = end_of(error, tmp_path / "none", monkeypatch)
    assert part in message and "\n" not in message and message.startswith("error: ")
    assert "is kept" not in message  # there is no workdir
    if "memory" in message:
        assert "python -m tango_jax.plan" in message


def test_a_full_device_that_was_explained_is_said_as_it_is(tmp_path, monkeypatch):
    message = "turn 5: sampling ran out of device memory: RESOURCE_EXHAUSTED: 9 bytes. Resume this run with: less=1"
    error = failures.OutOfMemory(message)
    assert not failures.is_out_of_memory(error) and failures.exit_code(error) == failures.FAILED
    assert end_of(error, tmp_path, monkeypatch) == f"error: {message}"


@pytest.mark.parametrize("kind", [AssertionError, AttributeError, TypeError, IndexError, NotImplementedError,
                                  RecursionError])
def test_a_mistake_of_the_program_keeps_its_traceback(kind, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runtime, "configure", lambda config: "")
    mistake = kind("ours")
    with pytest.raises(kind) as raised, runtime.session(default_config(), tmp_path):
        raise mistake
    assert raised.value is mistake and raised.traceback[0].path == Path(__file__)
    assert "ours" not in "".join(capsys.readouterr())  # Python prints it with the traceback
    with pytest.raises(kind) as raised:
        failures.last_line(mistake)
    assert raised.value is mistake


@pytest.mark.parametrize("error, part", [
    (RuntimeError("Unable to initialize backend 'cuda':\nno driver"), "Unable to initialize backend 'cuda': no driver"),
    (AssertionError(), "its package is not installed"),  # jax's own, for a platform that is known and not there
])
def test_a_device_that_is_not_there_is_a_mistake_of_the_users(monkeypatch, error, part):
    def devices():
        raise error

    monkeypatch.setattr(jax, "devices", devices)
    with pytest.raises(ValueError, match=part):
        hosts.check_devices()


def test_results_that_standard_output_does_not_take_are_one_line(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "<answer>\\\\boxed{a}</answer>", "gold": "a", "kind": "string"}\n')
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "tango_jax.grade", f"--file={rows}"], cwd=ROOT, stdout=full,
                              stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == failures.FAILED
    assert done.stderr.splitlines()[-1] == "error: grade.py, _write_rows: No space left on device (free some space)"
    assert "Exception ignored" not in done.stderr and "Traceback" not in done.stderr


# --------------------------------------------------------------------------------------------------- compile cache


def test_a_run_goes_on_without_a_compile_cache(tmp_path):
    (tmp_path / "file").touch()
    before = jax.config.jax_compilation_cache_dir
    message = runtime.use_compile_cache(str(tmp_path / "file" / "cache"))
    assert message.startswith(f"warning: compile_cache={tmp_path}/file/cache cannot be used") and "\n" not in message
    assert jax.config.jax_compilation_cache_dir == before


def test_a_compile_cache_that_fails_in_mid_run_is_said_once(capsys):
    with warnings.catch_warnings(record=True) as others:
        warnings.simplefilter("always")
        with runtime._one_cache_warning(Console()):
            for name in ("jit_a", "jit_b"):
                warnings.warn(f"Error writing persistent compilation cache entry for '{name}': full", stacklevel=1)
            warnings.warn("something else", stacklevel=1)
    assert capsys.readouterr().out.count("the compile cache fails") == 1
    assert [str(warning.message) for warning in others] == ["something else"]


# ---------------------------------------------------------------------------------------------------- metrics.jsonl


@pytest.fixture
def writer(tmp_path):
    with MetricsWriter(tmp_path / "run" / "metrics.jsonl") as writer:
        writer.write(1, "eval", {"a": 1.0})
        yield writer


@pytest.mark.parametrize("call", [lambda writer: writer.write(2, "eval", {"a": 2.0}), lambda writer: writer.position()])
def test_a_metrics_file_that_is_removed_comes_back_before_the_end(writer, tmp_path, call):
    path = tmp_path / "run" / "metrics.jsonl"
    before = path.read_bytes()
    path.unlink()
    with pytest.raises(ValueError, match="was removed during the run. Its rows have been restored"):
        call(writer)
    assert path.read_bytes() == before


@pytest.mark.parametrize("change", [
    lambda path: path.write_bytes(b""),  # a shell's `>`
    lambda path: os.replace(shutil.copy(path, f"{path}.new"), path),  # an editor
    lambda path: open(path, "ab").write(b"{}\n"),
])
def test_a_metrics_file_that_others_change_is_noticed_before_a_checkpoint_relies_on_it(writer, tmp_path, change):
    change(tmp_path / "run" / "metrics.jsonl")
    with pytest.raises(ValueError, match="was replaced or changed during the run"):
        writer.position()


def test_a_workdir_that_is_removed_is_not_made_again(writer, tmp_path):
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(ValueError, match="run was removed during the run"):
        writer.write(2, "eval", {"a": 2.0})
    assert not (tmp_path / "run").exists()


def test_a_row_that_does_not_fit_on_the_disk_names_the_file_and_is_cut_off_again(writer, tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    position, limits = writer.position(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (position + 5, limits[1]))  # Python ignores the signal that goes with it
    try:
        with pytest.raises(OSError, match="File too large.*metrics.jsonl"):
            writer.write(2, "eval", {"a": 2.0})
        writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.stat().st_size == position + 5
    with MetricsWriter(path, resume_at=position) as again:
        again.write(2, "eval", {"a": 2.0})
    assert [row["a"] for row in read_metrics(path)] == [1.0, 2.0]


def test_a_log_notices_at_its_end_what_happened_after_the_last_checkpoint(tmp_path):
    log = RunLog(tmp_path, default_config(), Console(enabled=False), resume_at=0)
    with pytest.raises(ValueError, match="Its rows have been restored"), log:
        log.write(1, "eval", {"a": 1.0})
        (tmp_path / "metrics.jsonl").unlink()
    assert [row["a"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1.0]
    log.close()


def test_ctrl_c_says_where_the_run_goes_on(tmp_path, monkeypatch, capfd):
    """Without unsaved work, and with some that was saved first; nothing is left of it for the next command."""
    handler = signal.getsignal(signal.SIGINT)
    message = end_of(KeyboardInterrupt(), tmp_path, monkeypatch)
    assert message == f"interrupted; the same command resumes from what is saved in {tmp_path}"
    message = end_of(KeyboardInterrupt(), tmp_path / "not_made", monkeypatch)
    assert message == "interrupted before anything was saved; run the same command again"
    with (
        pytest.raises(SystemExit) as stopped,
        runtime.session(default_config(), tmp_path),
    ):
        monkeypatch.setattr(termination._watch, "is_held", True)
        os.kill(os.getpid(), signal.SIGINT)
        assert "interrupted: will save and stop, at the latest after this step; press" in capfd.readouterr().err
        assert termination.is_requested()
        raise hosts.Preempted
    assert stopped.value.code == failures.INTERRUPTED == 130
    assert str(stopped.value) == f"interrupted: saved; the same command resumes in {tmp_path}"
    assert not termination.is_requested() and signal.getsignal(signal.SIGINT) is handler


def test_only_what_a_user_can_mend_is_a_mistake():
    """jax passes some failures of the machine on as ValueErrors."""
    lost = "UNKNOWN: Gloo AllGather failed: Connection reset by peer"
    errors = [ValueError("rl.gamma=-1 must be at least 0"), ValueError(lost), RuntimeError(lost), OSError(5, "I/O")]
    assert [failures.exit_code(error) for error in errors] == [2, 1, 1, 1]


def test_xla_does_not_ask_a_cpus_user_for_a_bug_report(monkeypatch):
    """It does after two minutes of one compilation. What the environment asks for is left alone."""
    config = default_config()
    config.compile_cache = ""
    before = jax.config.jax_logging_level
    try:
        monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
        runtime.configure(config)
        assert jax.config.jax_logging_level == before
        monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL")
        runtime.configure(config)
        assert jax.config.jax_logging_level == "CRITICAL"
    finally:
        jax.config.update("jax_logging_level", before)
