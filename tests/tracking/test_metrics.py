"""Metrics files resume at a byte and stay valid JSON."""


import jax
import numpy as np
import pytest

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
