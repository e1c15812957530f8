"""Numbers that break: NaN and infinite logits, absurd updates and broken checkpoints are noticed, by name."""

import types

import jax.numpy as jnp
import numpy as np
import pytest

from support.hf_cases import CASES, make_tensors, write_checkpoint
from tango_jax.cli.command_line import load_config
from tango_jax.config import default_config
from tango_jax.loop.breakdown import Broken, check_metrics, check_params, explained
from tango_jax.loop.resume import check_start
from tango_jax.rl.optimizer import make_optimizer
from tango_jax.rl.packing import PackShape, TrainSequence, pack
from tango_jax.rl.update import init_state, make_update
from tango_jax.runtime.checkpoint import Restored
from tango_jax.weights.from_hf import load_hf, model_config_from_hf


def update_ratio(lr: float) -> tuple[float, float]:
    """(loss, update_ratio) of one update with AdamW."""
    optimizer = default_config().generator.optimizer.copy_and_resolve_references()
    optimizer.lr = lr
    optimizer = make_optimizer(optimizer)
    batch = pack([TrainSequence([3], np.array([5], np.int32), np.ones(1, np.float32))], PackShape(2, 1), 1)

    def loss_fn(params, micro):
        return jnp.sum(micro.weight_NZRT) * jnp.sum(jnp.square(params["a"])), ({}, {})

    state = init_state(optimizer, {"a": jnp.array([3.0, -4.0]), "b": jnp.zeros(2, jnp.bfloat16)})
    metrics = make_update(optimizer, loss_fn)(state, batch)[1]
    return float(metrics["loss"]), float(metrics["update_ratio"])


@pytest.mark.parametrize("lr, expected", [(1e-3, 2.9274e-4), (1e5, 2.9274e4), (1e30, np.inf), (1e38, np.inf)])
def test_an_update_that_replaces_the_parameters_is_noticed_although_its_loss_is_finite(lr, expected):
    loss, ratio = update_ratio(lr)
    assert loss == pytest.approx(25.0)  # of the parameters before the update
    # Adam's first step is 1 in each place, and weight decay 0.01 adds 0.03 and 0.04: norm 1.4637 over 5. For the last
    # two the square of the update is no float32.
    assert ratio == pytest.approx(expected, rel=1e-3)
    metrics = {"generator/loss": loss, "generator/update_ratio": ratio}
    if expected < 1:
        check_metrics("generator", metrics)
        return
    with pytest.raises(Broken, match=r"replaced the parameters: generator/update_ratio |not finite: .*update_ratio"):
        check_metrics("generator", metrics)


def message_of(config, error=None, newest=4) -> str:
    with pytest.raises(FloatingPointError) as found, explained("turn 5", config, "runs/mine", lambda: newest):
        raise error or Broken("verifier", "gave values that are not finite: {'verifier/loss': nan}")
    return str(found.value)


def test_the_error_names_turn_and_role_and_advises_nothing_that_the_workdir_refuses():
    config = default_config().copy_and_resolve_references()
    config.generator.sft.steps = config.verifier.sft.steps = 3
    message = message_of(config)
    assert message.startswith("turn 5 gave values that are not finite: {'verifier/loss': nan}. Nothing of it is saved")
    assert "the newest checkpoint, of turn 4, holds finite parameters" in message
    assert "--config.generator.init_from=runs/mine --config.verifier.init_from=runs/mine" in message
    assert "a new --workdir" in message and "lower verifier.optimizer.lr (it is 1e-06)" in message
    config.verifier.model.lora.rank = 4
    assert "lower verifier.optimizer.lora_lr (it is 1e-05)" in message_of(config)  # ten times lr
    config.verifier.optimizer.lora_lr = 3e-4
    assert "lower verifier.optimizer.lora_lr (it is 0.0003)" in message_of(config)
    config.generator.init_from, config.verifier.sft.steps = "runs/before", 0
    message = message_of(config, newest=None)
    assert "there is no checkpoint yet" in message and "init_from" not in message
    assert message_of(config, FloatingPointError("as it was")) == "as it was"


def test_a_role_whose_parameters_broke_is_not_saved():
    params = {"a": np.ones(3, np.float32), "b": {"c": np.array([1.0, -1e30], np.float32)}}  # its square is infinite
    states = {"generator": types.SimpleNamespace(params={"a": params["a"]})}
    check_params(states)
    states["verifier"] = types.SimpleNamespace(params=params)
    with pytest.raises(Broken, match=r"found values that are NaN.* above 1e\+18 in verifier/params/b/c") as found:
        check_params(states)
    assert found.value.role == "verifier"


@pytest.mark.parametrize("name, settings, words", [
    ("generator", {"init_from": "runs/sft"}, "the stage 1 of the generator in runs/sft has changed"),
    ("verifier", {"checkpoint": "a/b"}, "verifier.checkpoint=a/b has changed"),
    ("problems", {}, "the problems of train.jsonl or test.jsonl have changed"),
    ("templates", {}, "a template file has changed"),
])
def test_a_run_does_not_go_on_from_something_else(name, settings, words):
    config = default_config()
    config.task.train, config.task.test = "train.jsonl", "test.jsonl"
    if settings:
        config[name].update(settings)
    now = {"generator": "a", "verifier": "b", "problems": "c", "templates": "d"}
    check_start(None, now, config)
    check_start(Restored(3, None, {"source_fingerprint": now}), now, config)
    with pytest.raises(ValueError, match=f"^{words} since the checkpoint of turn 3 was .*choose another --workdir"):
        check_start(Restored(3, None, {"source_fingerprint": now | {name: "x"}}), now, config)


@pytest.mark.parametrize("overrides, told", [
    ((), "the stage 1 of the verifier"), (("generator.sft.steps=0",), "the stage 1 of the verifier"),
    (("verifier.sft.steps=0",), "the stage 1 of the generator"),
    (("generator.init_from=a", "verifier.init_from=a"), "the stage 1 of the verifier in a"),
])
def test_of_one_policy_the_start_is_named_once(overrides, told):
    config = load_config("tiny", ["arm=self_verify", *overrides])
    before = {"generator": "a", "verifier": "a"}
    with pytest.raises(ValueError, match=f"^{told} has changed since the checkpoint of turn 3 was"):
        check_start(Restored(3, None, {"source_fingerprint": before}), dict.fromkeys(before, "x"), config)


def test_published_weights_that_are_not_finite_are_refused_by_name(tmp_path):
    tensors = make_tensors(CASES["qwen2"])
    tensors["model.layers.1.mlp.up_proj.weight"][3, 2] = np.nan
    folder = write_checkpoint(tmp_path / "qwen2", CASES["qwen2"], tensors=tensors)
    with pytest.raises(ValueError, match="qwen2: the array layers/up holds values that are NaN"):
        load_hf(folder, model_config_from_hf(folder))
