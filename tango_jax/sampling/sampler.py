"""Prompts in; sampled token ids and log-probabilities out, in consecutive batches (`batches.py`) or, with a budget of
cached tokens, in one that is refilled as rows end (`continuous.py`)."""

import dataclasses
import functools
from collections.abc import Callable

import jax

from tango_jax.models import cache as kv
from tango_jax.models import decode_layers, transformer
from tango_jax.models.decode_attention import decode_attention_of
from tango_jax.models.transformer import ModelConfig
from tango_jax.records import Rollout
from tango_jax.runtime.ahead import quick_options
from tango_jax.sampling import decode
from tango_jax.sampling.batches import BatchDriver
from tango_jax.sampling.buckets import SamplerConfig
from tango_jax.sampling.continuous import ContinuousDriver
from tango_jax.sampling.decode import shardings_of, state_specs
from tango_jax.sampling.logits import logits_spec
from tango_jax.sampling.request import SampleRequest, check_request, with_row_arrays
from tango_jax.sampling.resize import make_resize_fns
from tango_jax.sampling.slots import make_slot_fns
from tango_jax.sharding.layouts import decode_shardings, to_local
from tango_jax.sharding.placement import Placement


@dataclasses.dataclass(frozen=True)
class Sampler:
    """All processes take part in `layout`; each calls the rest by itself."""

    config: SamplerConfig
    placement: Placement | None  # None: the default device alone
    layout_fn: Callable  # (params) -> weights; jitted
    driver: BatchDriver | ContinuousDriver  # with the other jitted functions; jax.jit specialises each by shape

    def layout(self, weights: dict) -> dict:
        """Weights as the other methods take them (see decode_layers.split_layers). Call it once per phase."""
        laid_out = self.layout_fn(weights)
        return to_local(self.placement, laid_out) if self.placement else laid_out

    def sample(self, weights: dict, request: SampleRequest) -> Rollout:
        """ValueError: no prompt, an empty or too long one, or a limit below 1. FloatingPointError: infinite or NaN
        logits."""
        check_request(request, self.config.prompt_buckets[-1])
        return self.driver.sample(weights, with_row_arrays(request, self.config.cache_buckets[-1]))


def make_sampler(
    model_config: ModelConfig, config: SamplerConfig, stop_ids: tuple[int, ...], placement: Placement | None = None
) -> Sampler:
    """The sampler of one policy; without a placement, on the default device. Row buckets are rounded up to multiples of
    the devices. ValueError: `config.cache_tokens` is too small, or the device cannot run the decode attention."""
    # Joined matrices cannot be split over devices.
    join = placement is None or placement.local.shape["tensor"] == 1
    split = functools.partial(decode_layers.split_layers, model_config, join)
    weight_shardings = mesh = None
    if placement:
        config, mesh = config.with_row_multiple(placement.row_multiple), placement.local
        params = jax.eval_shape(lambda: transformer.init_weights(model_config, jax.random.key(0)))
        weight_shardings = decode_shardings(placement.decode, jax.eval_shape(split, params))
    config.check_cache_tokens()
    device = mesh.devices.flat[0] if placement else jax.local_devices()[0]
    implementation = decode_attention_of(model_config, config.buckets, device)
    model_config = dataclasses.replace(model_config, decode_attention=implementation)
    max_new = config.cache_buckets[-1]
    if config.cache_tokens:
        fns = make_slot_fns(model_config, stop_ids, config.prompt_buckets[-1], max_new, mesh)
        driver = ContinuousDriver(config, stop_ids, fns)
    else:
        # Pinned, so that each function takes another's result without compiling again.
        specs = state_specs()
        decode_fn = functools.partial(decode.decode, model_config, stop_ids, mesh=mesh)
        decode_fn = jax.jit(
            decode_fn, donate_argnums=1, out_shardings=shardings_of(mesh, specs), compiler_options=quick_options(mesh)
        )
        prefill_fn = jax.jit(
            functools.partial(decode.prefill, model_config, mesh),
            out_shardings=shardings_of(mesh, (specs.prefix, logits_spec(mesh, model_config.vocab_size))),
            compiler_options=quick_options(mesh),
        )
        begin_fn = functools.partial(decode.begin, model_config, stop_ids, config.cache_buckets[0], max_new, mesh)
        begin_fn = jax.jit(
            begin_fn, out_shardings=shardings_of(mesh, (specs.suffix, specs.step, specs.rows)),
            compiler_options=quick_options(mesh),
        )
        resize_fns = make_resize_fns(mesh, kv.key_axis(model_config))
        driver = BatchDriver(config, stop_ids, prefill_fn, begin_fn, decode_fn, resize_fns)
    return Sampler(config, placement, jax.jit(split, out_shardings=weight_shardings), driver)
