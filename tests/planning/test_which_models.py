"""`plan` without a configuration: which published models a target has room for."""

import json

import pytest

from tango_jax import plan
from tango_jax.planning import which_models
from tango_jax.planning.assumed_lengths import Even
from tango_jax.planning.costs import num_parameters
from tango_jax.planning.machines import GIB
from tango_jax.planning.targets import machine_of, open_target
from tango_jax.weights.presets import CONFIG_JSON, preset_model

# The largest, and those that the tests name. (Notebook 05, which is run by tests/notebook/test_notebooks.py, has the
# figures of all.)
EXAMINED = ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-7B", "meta-llama/Llama-3.1-70B-Instruct",
            "HuggingFaceTB/SmolLM2-135M-Instruct")


def found_on_l4() -> dict:
    found = which_models.which_models(open_target("l4", 1), machine_of("l4", 1), lengths=Even(0.5))
    return {(fit.name, fit.rank): fit for fit in found}


@pytest.fixture(scope="module")
def on_l4():
    """{(model, rank): record} of one L4."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(which_models, "CONFIG_JSON", {name: CONFIG_JSON[name] for name in EXAMINED})
        return found_on_l4()


@pytest.mark.long
def test_every_known_model_is_there_twice(on_l4, monkeypatch):
    assert on_l4.keys() == {(name, rank) for name in EXAMINED for rank in (0, 32)}
    some = next(iter(on_l4.values()))
    monkeypatch.setattr(which_models, "_fit", lambda name, rank, *_: some._replace(name=name, rank=rank))
    known = found_on_l4()
    assert known.keys() == {(name, rank) for name in CONFIG_JSON for rank in (0, 32)}
    for keys in (on_l4, known):
        sizes = [num_parameters(preset_model(name)) for name, _ in keys]
        assert sizes == sorted(sizes)


def test_memory_by_hand(on_l4):
    """In full 16 bytes a parameter and role at least: weights, two moments and a reference, each of four; with adapters
    the base once, in bfloat16, and its copy in the layout of sampling."""
    for name in ("HuggingFaceTB/SmolLM2-135M-Instruct", "Qwen/Qwen2.5-0.5B"):
        count = num_parameters(preset_model(name))
        full, adapted = on_l4[name, 0], on_l4[name, 32]
        assert 2 * 16 * count < full.peak and 2 * 2 * count < adapted.peak < full.peak
        assert full.fits and adapted.fits and adapted.turn_seconds < full.turn_seconds


def test_what_an_l4_has_room_for(on_l4):
    def fits(name, rank):
        return on_l4[name, rank].fits

    assert fits("Qwen/Qwen2.5-1.5B", 32) and not fits("Qwen/Qwen2.5-1.5B", 0)
    assert not fits("Qwen/Qwen2.5-7B", 32)
    assert all(fit.peak <= 0.95 * 23.58e9 for fit in on_l4.values() if fit.fits)


@pytest.fixture
def few_models(monkeypatch):
    names = ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-Math-7B")
    monkeypatch.setattr("tango_jax.planning.which_models.CONFIG_JSON", {name: CONFIG_JSON[name] for name in names})


def test_the_command(capsys, few_models):
    plan.main(["--target=h100:1", "--json"])
    found = {(fit["name"], fit["rank"]): fit for fit in json.loads(capsys.readouterr().out)}
    seven = found["Qwen/Qwen2.5-Math-7B", 32]
    assert seven["fits"] and 30 * GIB < seven["peak"] < 75.2 * GIB and seven["turn_seconds"] > 10
    assert not found["Qwen/Qwen2.5-Math-7B", 0]["fits"]


def test_the_table(capsys, few_models):
    plan.main(["--target=tpu-v5e:1"])
    shown = capsys.readouterr().out
    row = next(line for line in shown.splitlines() if "Qwen2.5-0.5B" in line)
    assert "(no)" in row and "adapters of rank 32" in shown and "assumed: 32 problems x 8 solutions a turn" in shown


def test_two_cards_in_one_process_or_in_two(capsys, few_models):
    def found(*words):
        plan.main([*words, "--json"])
        return {(fit["name"], fit["rank"]): fit for fit in json.loads(capsys.readouterr().out)}

    together, apart = found("--target=l4:2"), found("--target=l4:2", "--per-process=1")
    name = "Qwen/Qwen2.5-0.5B", 32
    assert together[name]["fits"] and apart[name]["fits"]
    # Each of two processes samples for half of the problems on one card.
    assert apart[name]["turn_seconds"] != together[name]["turn_seconds"]


@pytest.mark.parametrize("words, message", [
    (["--target=l5:1"], "choose one of a100-80gb"),
    (["--target=l4:2", "--per-process=3"], "--per-process=3: choose a number of devices that divides 2"),
    (["--target=l4:1", "--speed=2"], "--speed"),
    ([], "no --config is given"),
])
def test_mistakes_are_one_line(capsys, words, message):
    with pytest.raises(SystemExit) as stop:
        plan.main(words)
    assert stop.value.code == 2 and message in capsys.readouterr().err
