"""Metrics files resume at a byte, stay valid JSON, and compilations after warm-up are seen."""

import json

import jax
import numpy as np
import pytest

from tango_jax.runtime.atomic import write_json_atomic
from tango_jax.runtime.timers import CompileCounter, PhaseTimer
from tango_jax.tracking import metrics as metrics_lib
from tango_jax.tracking.metrics import MetricsWriter, read_metrics


def test_rows_are_flat_json_with_plain_numbers(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    values = {"a": np.float32(0.5), "b": jax.device_put(np.int32(3)), "c": float("nan"), "d": -np.inf, "e": True,
              "f": np.array(2.0), "g": None, "h": "x", "i": np.bool_(False)}
    with MetricsWriter(path) as writer:
        writer.write(np.int64(7), "generator", values)
        assert path.read_text() == (  # on disk before the file is closed
            '{"step": 7, "phase": "generator", "a": 0.5, "b": 3, "c": null, "d": null, "e": true, "f": 2.0, '
            '"g": null, "h": "x", "i": false}\n')
    assert read_metrics(path)[0]["b"] == 3


def test_an_array_is_no_metric(tmp_path):
    with MetricsWriter(tmp_path / "m.jsonl") as writer, pytest.raises(AssertionError, match="metric grads"):
        writer.write(1, "generator", {"grads": np.ones(2)})


def test_resume_cuts_the_file_to_the_checkpoint(tmp_path):
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(1, "warmup", {"x": 1})
        position = writer.position()
        writer.write(2, "warmup", {"x": 2})
    assert position == len('{"step": 1, "phase": "warmup", "x": 1}\n')
    with MetricsWriter(path, resume_at=position) as writer:
        assert writer.position() == position
        writer.write(2, "warmup", {"x": 3})
    assert [row["x"] for row in read_metrics(path)] == [1, 3]
    with MetricsWriter(path, resume_at=0):
        assert path.read_bytes() == b""


def test_resume_position_must_lie_at_the_end_of_a_line(tmp_path):
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(1, "eval", {})
        length = writer.position()
    with pytest.raises(ValueError, match=f"has {length} bytes, .* had {length + 1}"):
        MetricsWriter(path, resume_at=length + 1)
    with pytest.raises(ValueError, match="inside a line"):
        MetricsWriter(path, resume_at=length - 1)
    assert len(path.read_bytes()) == length


def test_half_a_last_line_is_left_out_and_cut_when_appending(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "phase": "eval"}\n{"step": 2, "pha')
    assert [row["step"] for row in read_metrics(path)] == [1]
    with MetricsWriter(path) as writer:
        writer.write(3, "eval", {})
    assert [row["step"] for row in read_metrics(path)] == [1, 3]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        read_metrics(path)


def test_disabled_writer_touches_nothing(tmp_path):
    with MetricsWriter(tmp_path / "m.jsonl", enabled=False) as writer:
        writer.write(1, "eval", {"x": 1})
        assert writer.position() == 0
    assert list(tmp_path.iterdir()) == []


def test_compile_counter_sees_new_shapes_only():
    @jax.jit
    def double_it(x):
        return x + x

    counter = CompileCounter()
    double_it(np.ones(3))
    assert (counter.total, counter.after_warmup) == (1, 0)
    counter.mark_warm()
    double_it(np.zeros(3))
    assert counter.after_warmup == 0
    double_it(np.ones(5))
    assert (counter.total, counter.after_warmup) == (2, 1)
    assert "double_it" in counter.late()[0].name and counter.late()[0].seconds > 0
    counter.close()
    double_it(np.ones(7))
    assert counter.total == 2


def test_compile_counter_counts_hits_of_the_persistent_cache(tmp_path):
    names = ["jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"]
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update(names[0], str(tmp_path))
    jax.config.update(names[1], 0.0)
    jax.experimental.compilation_cache.compilation_cache.reset_cache()
    hits = []

    def note_hit(event, **details):
        hits.append(event) if event == "/jax/compilation_cache/cache_hits" else None

    jax.monitoring.register_event_listener(note_hit)
    try:
        with CompileCounter() as counter:
            jax.jit(lambda x: x * 3)(np.ones(3))
            jax.clear_caches()
            jax.jit(lambda x: x * 3)(np.ones(3))
        assert (counter.total, len(hits)) == (2, 1)
    finally:
        jax.monitoring.unregister_event_listener(note_hit)
        for name, value in before.items():
            jax.config.update(name, value)
        jax.experimental.compilation_cache.compilation_cache.reset_cache()


def test_phase_timer_adds_up_and_starts_again(monkeypatch):
    ticks = iter([0.0, 2.0, 10.0, 10.5, 20.0, 21.0])
    monkeypatch.setattr(metrics_lib.time, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr(metrics_lib, "memory_gib", lambda: {"host": 1.5})
    timer = PhaseTimer()
    with timer("sample"):
        pass
    with pytest.raises(KeyError), timer("grade"):
        raise KeyError
    with timer("sample"):
        pass
    memory = {"memory/sample_host_gib": 1.5, "memory/grade_host_gib": 1.5}
    assert timer.pop() == {"time/sample_s": 3.0, "time/grade_s": 0.5} | memory
    assert timer.pop() == {}


def test_json_file_is_replaced_whole(tmp_path, monkeypatch):
    path = tmp_path / "out" / "summary.json"
    write_json_atomic(path, {"arm": "tango", "f1": np.float32(0.25), "rows": (1, float("inf"))})
    assert json.loads(path.read_text()) == {"arm": "tango", "f1": 0.25, "rows": [1, None]}
    with pytest.raises(TypeError):
        write_json_atomic(path, {"arm": object()})
    assert json.loads(path.read_text())["arm"] == "tango"
