"""In which precision products are made and gradients are summed, read from the traced programs: nothing is compiled."""

import dataclasses
import json
import types

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import jaxprs_in_params

from tango_jax.cli.command_line import load_config
from tango_jax.cli.validation import validate
from tango_jax.config import default_config
from tango_jax.models import decode_layers, head_precision
from tango_jax.models.transformer import ModelConfig
from tango_jax.planning.job import sized
from tango_jax.planning.sources import blank_tokenizer
from tango_jax.rl.policy import make_policy
from tango_jax.sampling import decode
from tango_jax.sampling.logits import sampling_params
from tango_jax.tracking.run_config import check_same_settings, save_config
from tango_jax.weights.source import Source
from tango_jax.weights.workdir import read_config

V = 72  # no other axis has this size
MODEL = ModelConfig(
    vocab_size=V, width=16, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=8, mlp_width=32, attention="xla",
    compute_dtype="bfloat16",
)


def policy_of(model: ModelConfig, fsdp: int, **mesh):
    config = default_config().generator
    config.max_prompt, config.max_response, config.logp_chunk = 8, 7, 5
    config.mesh.fsdp = fsdp
    config.mesh.update(mesh)
    return make_policy("generator", config, Source("", model, blank_tokenizer(model), None, lambda folder: None, {}))


def batch_of(policy):
    rl = default_config().rl
    rl.prompts_per_step = policy.placement.num_shards
    return sized(policy, rl, processes=1).batch


def equations(jaxpr):
    """All of a jaxpr's, and of those inside them."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def products(function, *arguments) -> tuple[list, list]:
    """Precisions of the products over the vocabulary (head and its gradients), and of all others."""
    found = [], []
    for equation in equations(function.trace(*arguments).jaxpr):
        if equation.primitive.name == "dot_general":
            shapes = [value.aval.shape for value in (*equation.invars, *equation.outvars)]
            found[not any(V in shape for shape in shapes)].append(equation.params["precision"])
    return found


HIGHEST = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)


@pytest.mark.parametrize("settings, precision", [
    ({"head_dtype": "float32"}, HIGHEST),
    ({"head_dtype": "float32", "head_precision": "bfloat16_x3"}, lax.DotAlgorithmPreset.BF16_BF16_F32_X3),
    ({"head_dtype": "bfloat16"}, None),
], ids=["float32", "three products", "bfloat16"])
def test_a_head_is_multiplied_as_its_settings_say_by_trainer_and_sampler(settings, precision):
    model = dataclasses.replace(MODEL, **settings)
    policy = policy_of(model, fsdp=1)
    state, batch = policy.abstract_state(), batch_of(policy)
    head, others = products(policy.update, state, batch)
    assert len(head) >= 3 and set(head) == {precision}  # forward, and two in the backward pass
    assert set(others) == {None}
    head, others = products(policy.score, state.params, batch)
    assert head and set(head) == {precision} and set(others) == {None}

    def sample(params):
        weights = decode_layers.split_layers(model, True, params)
        number_B = jnp.arange(2)
        prompts = decode.PromptBatch(
            token_PX=jnp.zeros((2, 8), jnp.int32), length_P=number_B + 1,
            rows=decode.RowStart(limit_B=number_B + 4, number_B=number_B, key_data=jnp.zeros(2, jnp.uint32)),
        )
        prefix, logits_BV = decode.prefill(model, None, weights, prompts)
        rest = decode.begin(model, (1,), 4, 4, None, logits_BV, prompts.rows, sampling_params(1.0))
        state = decode.DecodeState(prefix, *rest)
        return decode.decode(model, (1,), weights, state, sampling_params(1.0), 0)

    head, _ = products(jax.jit(sample), state.params)
    assert len(head) == 2 and set(head) == {precision}  # after the prompt, and in every step


@pytest.mark.parametrize("reduce_dtype, expected", [("float32", {"float32"}), ("bfloat16", {"bfloat16", "float32"})])
def test_gradients_are_summed_over_fsdp_in_the_dtype_that_the_mesh_says(reduce_dtype, expected):
    policy = policy_of(MODEL, fsdp=8, grad_reduce_dtype=reduce_dtype)
    found = {"reduce_scatter": set(), "all_gather": set()}
    for equation in equations(policy.update.trace(policy.abstract_state(), batch_of(policy)).jaxpr):
        if equation.primitive.name in found:
            found[equation.primitive.name].add(str(equation.invars[0].aval.dtype))
    assert found == {"reduce_scatter": expected, "all_gather": {"bfloat16", "float32"}}  # the head is float32


def test_a_run_of_before_there_was_a_choice_goes_on(tmp_path):
    config, file = load_config("configs/tiny.py"), tmp_path / "config.json"
    save_config(config, file)
    added = ("generator.mesh.grad_reduce_dtype", "verifier.mesh.grad_reduce_dtype")
    saved = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in saved.items() if key not in added}))
    assert read_config(tmp_path).verifier.mesh.grad_reduce_dtype == "float32"
    check_same_settings(config, file)


@pytest.mark.parametrize("override, message", [
    *((f"verifier.model.{key}=float16", rf"verifier\.model\.{key}='float16' is not one of .*bfloat16: .*loss scaling")
      for key in ("param_dtype", "compute_dtype")),
    ("generator.mesh.grad_reduce_dtype=float16",
     r"generator\.mesh\.grad_reduce_dtype='float16' is not one of float32, bfloat16"),
])
def test_float16_is_refused(override, message):
    with pytest.raises(ValueError, match=message):
        validate(load_config("configs/tiny.py", [override]))


def test_a_gpu_that_cannot_split_a_heads_products_is_an_error():
    refused = {}
    for capability in ("7.5", "8.0", "gfx942", ""):  # a T4, an A100, an AMD GPU, no GPU
        for precision in head_precision.HEAD_PRECISIONS:
            try:
                head_precision.check_head_precision(precision, types.SimpleNamespace(compute_capability=capability))
            except ValueError as error:
                refused[capability, precision] = str(error)
    assert list(refused) == [("7.5", "bfloat16_x3")]
    assert refused["7.5", "bfloat16_x3"].endswith("8.0 or more, and this one has 7.5: set model.head_precision=highest")
