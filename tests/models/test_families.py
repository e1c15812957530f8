"""Families whose layers are not Llama's, in small: what samples agrees with what trains, with adapters, on several
devices and whatever is recomputed. Their logits are compared with PyTorch's in tests/weights/test_from_hf.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from support import tiny_sampler
from support.families import FAMILIES
from tango_jax.config import default_config
from tango_jax.models import lora, transformer
from tango_jax.models.lora import LoraConfig
from tango_jax.models.transformer import LayerKind
from tango_jax.records import with_base
from tango_jax.rl.packing import PackShape, TrainSequence, pack
from tango_jax.rl.score import make_score, micro_batch
from tango_jax.rl.supervised import make_nll_loss
from tango_jax.sampling.buckets import SamplerConfig
from tango_jax.sampling.request import SampleRequest
from tango_jax.sampling.sampler import make_sampler
from tango_jax.sharding.placement import TRAIN_AXES, make_placement

# With a pattern five layers: two repeats of it, and a rest.
BASE = tiny_sampler.MODEL
# What each would be without something that it has of its own.
OTHERWISE = {
    "smollm3": dict(pattern=BASE.pattern), "gemma3_text": dict(pattern=(LayerKind(rope_base=100.0), LayerKind())),
    "olmo2": dict(qk_norm_whole=False),
}
MODELS = {name: dataclasses.replace(BASE, num_layers=5 if "pattern" in fields else 2, **fields)
          for name, fields in FAMILIES.items()}
# Fewer layers for samplers, which compile each by itself: one repeat, and a rest.
SAMPLED = {name: dataclasses.replace(model, num_layers=3) if model.num_layers == 5 else model
           for name, model in MODELS.items()}
BUCKETS = SamplerConfig(prompt_buckets=(8,), cache_buckets=(4, 12), row_buckets=(3, 6))
PROMPTS = ([20, 21, 22, 23, 24, 25, 26], [30, 31])
EACH = pytest.mark.parametrize("name", FAMILIES)


def random_params(model):
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: transformer.init_params(model, jax.random.key(0)))

    def leaf(path, shape):
        is_norm = path[-1].key.endswith("norm")
        mean, spread = (1 - (model.norm_offset or 0), 0.3) if is_norm else (0, 0.6)
        return (mean + spread * rng.normal(size=shape.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(leaf, shapes)


def with_adapters(model, params):
    """The model with adapters of rank 3, of which neither A nor B is zero."""
    model, rng = dataclasses.replace(model, lora=LoraConfig(3, 6.0)), np.random.default_rng(2)
    fresh = lora.init_adapters(model, jax.random.key(0))
    adapters = jax.tree.map(lambda leaf: (0.3 * rng.normal(size=leaf.shape)).astype(np.float32), fresh)
    return model, with_base(lora.freeze(model, jax.tree.map(jnp.asarray, params)), adapters)


def sampled(model, params, buckets, placement=None):
    sampler = make_sampler(model, buckets, tiny_sampler.STOP_IDS, placement)
    request = SampleRequest(prompts=PROMPTS, group_size=3, temperature=1.0, key_data=np.array([1, 2], np.uint32))
    return sampler.sample(sampler.layout(params), request)


def packed(responses, logps, shape, num_shards=1):
    sequences = [
        TrainSequence(PROMPTS[b // 3], tokens, np.ones(len(tokens), np.float32), 0.0, own)
        for b, (tokens, own) in enumerate(zip(responses, logps, strict=True))
    ]
    return pack(sequences, shape, 6, 2, num_shards)


def assert_scored(model, params, rollout, shape):
    """The trainer's log-probs of what was sampled are the sampler's; returns the batch and the trainer's."""
    assert max(map(len, rollout.tokens)) > 7  # a cache that grew, and every window is shorter than a sequence
    batch = packed(rollout.tokens, rollout.logps, shape)
    assert batch.segment_NZRT.max() > 1
    mask, scored = batch.is_action_NZRT, make_score(model, 1.0, 0)(params, batch)
    np.testing.assert_allclose(scored[mask], batch.sampler_logp_NZRT[mask], **tiny_sampler.FLOAT)
    return batch, np.asarray(scored[mask])


@pytest.mark.long
@EACH
def test_a_sampler_with_adapters_agrees_with_the_trainer_and_with_the_merged_model(name):
    model, weights = with_adapters(MODELS[name], random_params(MODELS[name]))
    batch, scored = assert_scored(model, weights, sampled(model, weights, BUCKETS), PackShape(24, 2))
    merged = make_score(MODELS[name], 1.0, 0)(lora.merge(model, weights), batch)[batch.is_action_NZRT]
    np.testing.assert_allclose(scored, merged, **tiny_sampler.FLOAT)


@pytest.mark.long
@EACH
def test_a_budget_of_cached_tokens_and_split_heads_agree_with_the_trainer(name):
    """On two devices that share the heads, rows that begin when others end; scored beside their shared prompts."""
    settings = default_config().generator.mesh
    settings.tensor = settings.decode_tensor = 2
    placement, model = make_placement(settings, jax.devices()[:2]), SAMPLED[name]
    params = random_params(model)
    buckets = dataclasses.replace(BUCKETS, row_buckets=(2, 4), cache_tokens=60)
    rollout = sampled(model, params, buckets, placement)
    batch, scored = assert_scored(model, params, rollout, PackShape(40, 2, 2, (9,)))
    # What the family has of its own matters: without it they are others.
    plain = make_score(dataclasses.replace(model, **OTHERWISE[name]), 1.0, 0)(params, batch)[batch.is_action_NZRT]
    assert np.abs(plain - scored).max() > 0.1


@pytest.mark.long
@pytest.mark.parametrize("prompt_bucket, cache_dtype", [(8, ""), (8, "int8"), (4, ""), (3, "")])
def test_layers_with_a_window_see_its_columns_alone(prompt_bucket, cache_dtype):
    """Through larger caches and fewer rows; where the prompt bucket is the window, too, and where it is smaller."""
    model = dataclasses.replace(SAMPLED["gemma3_text"], sample_cache_dtype=cache_dtype)
    params, prompts = random_params(model), [PROMPTS[0][:prompt_bucket], PROMPTS[1]]
    buckets = dataclasses.replace(BUCKETS, prompt_buckets=(prompt_bucket,), cache_buckets=(3, 6, 12))
    sampler = make_sampler(model, buckets, ())
    request = SampleRequest(prompts=prompts, group_size=3, temperature=1.0, key_data=np.array([1, 2], np.uint32))
    rollout = sampler.sample(sampler.layout(params), request)
    assert {len(tokens) for tokens in rollout.tokens} == {12}
    sequences = [TrainSequence(prompts[b // 3], tokens, np.ones(12, np.float32), 0.0, own)
                 for b, (tokens, own) in enumerate(zip(rollout.tokens, rollout.logps, strict=True))]
    batch = pack(sequences, PackShape(24, 2), 6)
    mask, scored = batch.is_action_NZRT, make_score(model, 1.0, 0)(params, batch)
    limits = dict(atol=0.2) if cache_dtype else tiny_sampler.FLOAT
    np.testing.assert_allclose(scored[mask], batch.sampler_logp_NZRT[mask], **limits)


def loss_and_gradients(model, params, batch, mesh=None, chunk=0):
    loss_fn, micro = make_nll_loss(model, chunk, mesh), micro_batch(jax.tree.map(jnp.asarray, batch), 0)
    (loss, _), grads = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(params, micro)
    leaves = jax.tree_util.tree_leaves_with_path(grads)
    return {"loss": loss} | {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


@pytest.mark.long
@EACH
def test_devices_remat_and_unrolling_change_no_gradient(name):
    model, params = MODELS[name], random_params(MODELS[name])
    rng = np.random.default_rng(1)
    responses = [rng.integers(10, 70, count).astype(np.int32) for count in (9, 4, 6, 8, 3, 7)]
    batch = packed(responses, [0.0] * 6, PackShape(20, 2, 1, (9,)), num_shards=2)
    wanted = loss_and_gradients(model, params, batch)
    mesh = jax.make_mesh((1, 2, 2), TRAIN_AXES, axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[:4])
    in_rows = packed(responses, [0.0] * 6, PackShape(48, 1, joins_prompts=True), num_shards=2)
    assert in_rows.num_micro == 1 and in_rows.prompt_NZRT.any()
    others = {
        "four devices": loss_and_gradients(dataclasses.replace(model, remat="full"), params, batch, mesh),
        "four devices, prompts in rows, logits in chunks": loss_and_gradients(model, params, in_rows, mesh, chunk=7),
        "dots, unrolled": loss_and_gradients(dataclasses.replace(model, remat="dots", unroll=True), params, batch),
    }
    for other, got in others.items():
        for leaf, value in wanted.items():
            error = np.abs(got[leaf] - value).max() / np.abs(value).max()
            assert error < 2e-4, (other, leaf, error)
            assert np.abs(value).max() > 1e-4, leaf
