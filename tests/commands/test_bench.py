"""`python -m tango_jax.bench`: the fixed shapes, run at smaller sizes, and mistakes in one line."""

import dataclasses
import json

import pytest

from tango_jax import bench


@pytest.fixture
def small(monkeypatch):
    """A smaller model, shorter lengths and fewer rows; nothing here is as slow as measuring a machine."""
    model = dataclasses.replace(bench.MODEL, width=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8,
                                mlp_width=16)
    monkeypatch.setattr(bench, "MODEL", model)
    for name, size in {"P": 2, "M": 2, "PROMPT": 8, "VERIFIER_PROMPT": 16}.items():
        monkeypatch.setattr(bench, name, size)
    monkeypatch.setattr(bench, "configure", lambda config: "")
    monkeypatch.setattr(bench, "machine_rates", lambda: {"matmul_gflops": 100.0, "read_gb_s": 20.0})


@pytest.mark.long
def test_every_shape_is_timed(small, capsys):
    bench.main(["--runs=1", "--json", "--only=R1,R2,R3,R5"])
    report = json.loads(capsys.readouterr().out)
    assert list(report) == ["R1", "R2", "R3", "R5", "machine"]
    assert report["R1"]["tokens_per_s"] > 0 and min(report[name]["seconds"] for name in ("R2", "R3", "R5")) > 0


def test_stopping_lengths():
    lengths = bench.heavy_tailed_lengths()
    assert (len(lengths), lengths.mean(), lengths.max()) == (64, 128, 512) and lengths.min() >= 1


def test_mistakes_end_in_one_line(capsys):
    for arguments, message in [
        (["--only=decode"], "--only=decode: choose from R1, R2, R3, R4, R5"),
        (["--model=qwen2_5_0_5b"], "unknown argument '--model=qwen2_5_0_5b'"),
        (["--runs=0"], "--runs=0 must lie between 1 and "),
    ]:
        with pytest.raises(SystemExit) as stopped:
            bench.main(arguments)
        assert stopped.value.code == 2, arguments
        said = capsys.readouterr()
        assert message in said.err and said.out == "" and len(said.err.splitlines()) == 1, said.err
