"""Published measurements: their rows, and the shares that follow from them (planning/shares.py)."""

import pytest

from support import published
from support.published import (
    MODELS,
    Row,
    fit,
    interval,
    model_of,
    predicted_seconds,
    published_fit,
    published_rows,
    ratio,
    reached_share,
    response_lengths,
    solved,
)
from tango_jax.planning.costs import MicroBatchShape, update_flops
from tango_jax.planning.shares import GENERATIONS, LOST_BY_HOSTS, MEASURED, OTHER_GPUS, Shares, reached
from tango_jax.planning.targets import TARGETS, Target, open_target
from tango_jax.weights.presets import CONFIG_JSON, preset_model

ROW = Row("fitted", "update", "h100", 8, "Llama-2-7B", 1, 32, 0, 0, 4096, 0, 1, "none", 1.0, "s", "", "")
H100, A100 = TARGETS["h100"], TARGETS["a100-80gb"]


def measured(row: Row, **shares: float) -> Row:
    """The row as a device would measure it that reaches these shares."""
    return row._replace(measured=predicted_seconds(row, Shares()._replace(**shares)))


def test_every_row_can_be_read_and_priced():
    rows = published_rows()
    assert len(rows) > 50 and {row.use for row in rows} == {"fitted", "held out"}
    for row in rows:
        assert row.what and row.source and row.model in MODELS and row.devices % row.tensor == 0, row
        assert 0 < ratio(row, published_fit()) < 2, row
    assert {MODELS["Llama-3.1-8B"][1], MODELS["Qwen2.5-7B"][1]} == {4096, 3584}


@pytest.mark.parametrize("name", [name for name in MODELS if any(name in known for known in CONFIG_JSON)])
def test_sizes_are_those_of_the_known_checkpoints(name):
    known = preset_model(next(one for one in CONFIG_JSON if name in one))
    model = model_of(name)
    for field in ("vocab_size", "width", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp_width"):
        assert getattr(model, field) == getattr(known, field)


def test_units_by_hand():
    """32 rows of 4096 tokens on eight devices are 16,384 tokens of each; at 8,192 tokens/s they take two seconds."""
    row = ROW._replace(measured=8192, unit="tokens/s")
    assert row.seconds == 2 and row.in_unit(4) == 4096
    assert ROW._replace(measured=13.3, unit="ms").seconds == pytest.approx(0.0133)
    # Of a response alone where it is sampled.
    assert row._replace(kind="sample", prompt=10, rows=8, response=64, measured=32).seconds == 2
    # As MaxText counts: 6 for each of 6.607 G weights, 12 x 32 layers x 4096 tokens x 4096 for attention.
    flops = 6 * (32 * (4 * 4096**2 + 3 * 4096 * 11008) + 32000 * 4096) + 12 * 32 * 4096 * 4096
    assert row._replace(measured=1.0, unit="TFLOP/s").seconds == pytest.approx(16_384 * flops / 1e12)


def test_an_update_by_hand():
    """The products of four sequences on each device, at half of 989 TFLOP/s."""
    flops = update_flops(model_of("Llama-2-7B"), MicroBatchShape(1, 4096), 1, "cudnn", is_chunked=False).total
    assert predicted_seconds(ROW, Shares()) == pytest.approx(4 * flops / (0.5 * 989e12))


def test_rows_that_end_one_after_another():
    row = ROW._replace(kind="sample", prompt=100, response=500, longest=4000)
    lengths = response_lengths(row)
    assert lengths.mean() == pytest.approx(500, rel=0.1) and lengths.max() < 4000
    # All equal, they are over after 500 steps; with a tail the last of them takes several times as many.
    equal, tailed = (predicted_seconds(one, Shares()) for one in (row._replace(longest=0), row))
    assert 1.5 * equal < tailed < 8 * equal
    at_once = predicted_seconds(row._replace(longest=0, slots=32), Shares())
    assert at_once == pytest.approx(equal, rel=0.01)  # 32 at a time are all


def test_a_share_is_solved():
    assert solved(lambda share: 3 / share, 6.0) == pytest.approx(0.5, rel=1e-6)
    assert solved(lambda share: 3 / share + 1, 1.0) == pytest.approx(published.MOST_SHARE, rel=1e-6)  # there is none
    for name in ("update", "score", "prefill"):
        row = measured(ROW._replace(kind=name, prompt=512), **{name: 0.37})
        assert reached_share(row, Shares(), name) == pytest.approx(0.37, rel=1e-6)


def test_the_fit_by_hand():
    """Shares of 0.4 and 0.9 have the geometric mean 0.6; of one that halves from one host to sixteen, the power is 1/4.
    What is held out changes nothing."""
    same = [measured(ROW, update=share) for share in (0.4, 0.9)]
    assert fit([*same, measured(ROW, update=0.1)._replace(use="held out")]).of(H100, 1).update == pytest.approx(0.6)
    scaled = [measured(ROW, update=0.5), measured(ROW._replace(devices=128), update=0.25)]
    found = fit(scaled)
    assert found.decline == pytest.approx(0.25) and found.of(H100, 16).update == pytest.approx(0.25)
    assert found.of(TARGETS["h200"], 1).update == pytest.approx(0.5)  # of the same generation
    # Slices of TPUs are one machine: no power.
    tpu = fit([*scaled, measured(ROW._replace(device="tpu-v6e"), update=0.6)]).of(TARGETS["tpu-v6e"], 64)
    assert tpu.update == pytest.approx(0.6)


def test_what_nobody_has_measured():
    """Scores run as updates do; a device of which nothing is known is the mean of the others of its platform."""
    rows = [measured(ROW, update=0.4), measured(ROW._replace(device="a100-80gb"), update=0.9),
            measured(ROW._replace(kind="decode"), read=0.8)]
    found = fit(rows)
    assert found.of(A100, 1).score == found.of(A100, 1).prefill == pytest.approx(0.9)
    assert found.of(TARGETS["l4"], 1).update == pytest.approx(0.6)
    assert found.of(A100, 1).read == pytest.approx(0.8, rel=1e-5)
    assert [name for name in Shares._fields if found.is_measured(A100, name)] == ["update"]


CPU = Target("cpu", "cpu", *[1.0] * 8, per_host=1)


@pytest.mark.parametrize("target", [*TARGETS.values(), CPU], ids=lambda target: target.name)
def test_the_shares_are_those_of_the_measurements(target):
    generation = GENERATIONS.get(target.name, OTHER_GPUS)
    ends = interval(target)
    for name in Shares._fields:  # with two digits
        assert MEASURED[generation][name] == pytest.approx([getattr(end, name) for end in ends], abs=0.00501), name
    assert -LOST_BY_HOSTS == pytest.approx(published_fit().decline, abs=0.0005)


def test_a_target_is_opened_with_its_shares():
    alone, many = (open_target("h100", count).reached for count in (8, 128))
    assert alone == reached("h100", 1) and alone.likely.update == MEASURED["h100"]["update"][1]
    assert many.likely.update == pytest.approx(alone.likely.update * 16**LOST_BY_HOSTS)
    assert many.slow.read == alone.slow.read < alone.likely.read < alone.quick.read
    assert open_target("tpu-v5p", 64).reached.likely.update == MEASURED["tpu-v5p"]["update"][1]
    assert "as other GPUs were measured" in open_target("l4", 1).reached.basis


def test_measurements_lie_within_the_interval():
    """Of each device, those of its own updates and scores, from the quickest to the slowest."""
    for row in published_rows():
        if row.device in TARGETS and row.kind in ("update", "score"):
            slow, _, quick = (predicted_seconds(row, shares) for shares in interval(row.target, row.hosts))
            assert quick <= row.seconds * 1.001 and row.seconds <= slow * 1.001, row
