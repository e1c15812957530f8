"""The numbers of one short run, as they were when they were last looked at: a change of any of them must be meant.

The expected numbers are in fixtures/golden_tiny.json. When a change is meant, write them anew and read the difference
before it is committed:

    python -m pytest tests/loop/test_golden.py --refresh-golden
    git diff tests/fixtures/golden_tiny.json

The run is that of `configs/tiny.py` with a longer stage 1 (see conftest.py). Processors that round differently agree to
about 1e-4; a new version of JAX may need new numbers.
"""

import json
from pathlib import Path

import pytest

from support.paths import FIXTURES
from tango_jax.tracking.metrics import read_metrics

GOLDEN = FIXTURES / "golden_tiny.json"
NAMES = (
    "generator/sft_loss", "generator/sft_heldout_loss", "verifier/sft_loss", "verifier/sft_heldout_loss",
    "generator/accuracy", "verifier/pool/step_f1", "verifier/pool/outcome_f1",
    "generator/reward/outcome", "generator/reward/format", "generator/reward/step", "generator/alpha",
    "verifier/reward/correctness", "verifier/reward/format", "verifier/label_count_correct",
    *(f"{role}/{name}" for role in ("generator", "verifier")
      for name in ("tokens_sampled", "loss", "grad_norm", "entropy", "kl")),
)


def chosen(workdir: Path) -> list[dict]:
    """The rows of both stages with the chosen numbers, rounded to six digits."""
    stage_one = [read_metrics(workdir / "sft" / role / "metrics.jsonl")[-1:] for role in ("generator", "verifier")]
    rows = [*stage_one[0], *stage_one[1], *read_metrics(workdir / "metrics.jsonl")]
    return [
        {name: row[name] for name in ("step", "phase")}
        | {name: float(f"{row[name]:.6g}") for name in NAMES if name in row}
        for row in rows
    ]


def test_the_run_gives_the_numbers_it_gave(tiny_run, request):
    rows = chosen(tiny_run.workdir)
    if request.config.getoption("--refresh-golden"):
        GOLDEN.write_text("[\n" + ",\n".join(f" {json.dumps(row)}" for row in rows) + "\n]\n")
        pytest.skip(f"wrote {GOLDEN}")
    golden = json.loads(GOLDEN.read_text())
    assert [(row["step"], row["phase"]) for row in rows] == [(row["step"], row["phase"]) for row in golden]
    different = []
    for row, expected in zip(rows, golden, strict=True):
        assert row.keys() == expected.keys()
        different += [
            f"step {row['step']} ({row['phase']}) {name}: {row[name]}, was {expected[name]}"
            for name in row
            if name != "phase" and row[name] != pytest.approx(expected[name], rel=1e-3, abs=1e-6)
        ]
    assert not different, "\n".join(["see the docstring of this file to refresh", *different])


def test_the_run_has_something_to_compare():
    """A run in which every reward is the same would leave most of a turn unseen."""
    golden = json.loads(GOLDEN.read_text())
    for name in ("outcome", "format", "step"):
        assert len({row.get(f"generator/reward/{name}", 0.0) for row in golden}) > 1
    for name in ("correctness", "format"):
        assert len({row.get(f"verifier/reward/{name}", 0.0) for row in golden}) > 1
    assert {row["phase"] for row in golden} == {"sft", "eval", "warmup", "generator", "verifier"}
