"""No collective of an update moves more than it must: compiled programs against arithmetic, in float32 on virtual
devices, and for an absent A100 where its compiler is installed."""
import dataclasses

import jax
import numpy as np
import pytest

from support.hlo import collectives, gathers_beside_products, wire_bytes_by_kind
from tango_jax.cli.command_line import load_config
from tango_jax.config import default_config
from tango_jax.models.transformer import ModelConfig
from tango_jax.planning.costs import MicroBatchShape
from tango_jax.planning.job import make_job, sized
from tango_jax.planning.programs import examine, lowered_functions
from tango_jax.planning.sources import blank_tokenizer
from tango_jax.planning.targets import TARGETS, missing_compilers, open_devices
from tango_jax.planning.traffic import HIDDEN_IN_UPDATES, param_sizes, score_traffic, update_traffic
from tango_jax.rl.policy import make_policy
from tango_jax.rl.supervised import make_nll_loss
from tango_jax.weights.source import Source

MODEL = ModelConfig(
    vocab_size=512, width=128, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=16, mlp_width=256, attention="xla",
    tied_head=False,
)
CASES = {
    "parameters split over all, one table": ((1, 8, 1), {"tied_head": True}),
    "all axes, a vocabulary that nothing divides": ((2, 2, 2), {"vocab_size": 511, "qkv_bias": True}),
    "norms of q and k, nothing again": ((1, 2, 4), {"qk_norm": True, "remat": "none"}),
}
# Machine code is neither run nor looked at: the least effort for it.
QUICK = {"xla_backend_optimization_level": 0}
ALLOWED = 1.25


def needed(model: ModelConfig, mesh, tokens: MicroBatchShape, chunk: int) -> dict[str, float]:
    """{kind: bytes} that a device must receive for one micro-batch of an update."""
    none = {"all-gather": 0.0, "reduce-scatter": 0.0, "all-reduce": 0.0}
    return none | wire_bytes_by_kind(update_traffic(model, mesh, tokens, chunk), passes=1)


def small_policy(model: ModelConfig, data: int, fsdp: int, tensor: int):
    config = default_config().generator
    config.max_prompt, config.max_response, config.logp_chunk = 32, 63, 48  # 128 tokens in chunks of 48
    config.rows_per_micro_batch, config.prompts_per_micro_batch = 2, 1
    config.mesh.data, config.mesh.fsdp, config.mesh.tensor = data, fsdp, tensor
    return make_policy("generator", config, Source("", model, blank_tokenizer(model), None, lambda folder: None, {}))


@pytest.mark.parametrize("case", CASES)
def test_an_update_sends_what_it_must(case):
    axes, changes = CASES[case]
    model = dataclasses.replace(MODEL, **changes)
    policy = small_policy(model, *axes)
    rl = default_config().rl
    rl.prompts_per_step = policy.placement.num_shards
    batch = sized(policy, rl, processes=1).batch
    compiled = policy.update.lower(policy.abstract_state(), batch).compile(QUICK)
    found = wire_bytes_by_kind(collectives(compiled.as_text(), 8), passes=1)
    need = needed(model, policy.placement.train, MicroBatchShape(2, 64, 1, 32), 48)
    print(axes, {kind: f"{need.get(kind, 0):.0f} needed, {found.get(kind, 0):.0f} found" for kind in need | found})
    assert set(found) <= set(need)
    for kind, size in found.items():
        assert size <= need[kind] * 1.01 + 1000, kind  # the metrics are a few numbers more
    for kind, size in need.items():
        # A tied table in one dtype is gathered once, for both uses.
        assert found.get(kind, 0.0) >= 0.9 * size, kind


def test_bytes_by_hand():
    # D=4, H=K=2, E=2, F=8, V=6, L=1. On a layer's matrices: 3 x 16 + 16 + 3 x 32 = 160; table and head 24 each.
    model = ModelConfig(
        vocab_size=6, width=4, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=2, mlp_width=8, tied_head=False,
        compute_dtype="bfloat16",
    )
    mesh = small_policy(dataclasses.replace(MODEL, width=4 * 32), 2, 2, 2).placement.train
    need = needed(model, mesh, MicroBatchShape(rows=1, row_length=10), chunk=4)
    # Over fsdp a device lacks half. Layers twice in bfloat16, table in bfloat16, head in float32; half of each over
    # tensor.
    assert need["all-gather"] == 0.5 * (2 * 80 * 2 + 12 * 2 + 12 * 4)
    assert need["reduce-scatter"] == 0.5 * (80 + 12 + 12) * 4  # summed in float32
    narrow = dataclasses.replace(model, grad_reduce_dtype="bfloat16")
    need_narrow = needed(narrow, mesh, MicroBatchShape(rows=1, row_length=10), chunk=4)
    # The head is used in float32, and no sum is narrower than the use.
    assert need_narrow == need | {"reduce-scatter": 0.5 * (80 * 2 + 12 * 2 + 12 * 4)}
    data = 2 * 0.5 * 4 * (80 + 12 + 12) / 2  # float32 of what is stored, between two
    rows = 2 * 0.75 * 4 * (3 * 4)  # three norms of 4, between four
    # Activations of 10 tokens: twice forward, once again, twice backward, once for the table; of 12 in chunks, once.
    tensor = 2 * 0.5 * ((5 * 10 + 10 + 12) * 4 * 2 + 12 * 8 * 4)
    assert need["all-reduce"] == data + rows + tensor


def test_only_layers_are_sent_while_products_run():
    """Of layers: a quarter of the gathers and all scatters in an update, half of the gathers in a score."""
    mesh = small_policy(dataclasses.replace(MODEL, width=4 * 32), 1, 8, 1).placement.train
    tokens = MicroBatchShape(rows=1, row_length=10)
    matrices = len([name for name, _ in param_sizes(MODEL) if name.startswith("layers/") and "norm" not in name])
    for traffic, kind, hidden, others in (
        (update_traffic, "all-gather", 0.25, 2), (update_traffic, "reduce-scatter", 1.0, 2),
        (score_traffic, "all-gather", 0.5, 2), (update_traffic, "all-reduce", 0.0, 3),
    ):
        shares = [item.hidden for item in traffic(MODEL, mesh, tokens, 4) if item.kind == kind]
        expected = [0.0] * others if kind == "all-reduce" else [hidden] * matrices + [0.0] * others
        assert sorted(shares) == sorted(expected), kind


def test_a_vocabulary_that_tensor_does_not_divide_gives_the_numbers_of_one_device():
    model = dataclasses.replace(MODEL, vocab_size=511, num_layers=1, width=64, mlp_width=64)
    config, losses = default_config().rl, {}
    config.prompts_per_step = 2
    for axes in ((1, 1, 1), (1, 2, 4)):
        policy = small_policy(model, *axes)
        shapes = sized(policy, config, processes=1).batch
        # Z is 1 or 2: the same row twice, so that the sums differ by a factor of two.
        batch = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), shapes)
        micro = jax.tree.map(lambda leaf: leaf[0] if np.ndim(leaf) else leaf, batch)
        loss_fn = make_nll_loss(model, 48, policy.placement.train)
        rng = np.random.default_rng(0)
        params = jax.tree.map(
            lambda leaf, place, rng=rng: jax.device_put(rng.normal(0, 0.1, leaf.shape).astype(leaf.dtype), place),
            policy.abstract_state().params, policy.shardings.params,
        )
        loss_and_grad = jax.value_and_grad(lambda p, m, fn=loss_fn: fn(p, m)[0])
        loss, grads = jax.jit(loss_and_grad, compiler_options=QUICK)(params, micro)
        shards = policy.placement.num_shards
        losses[axes] = float(loss) / shards, jax.tree.map(lambda leaf, n=shards: np.asarray(leaf) / n, grads)
    (one, one_grads), (many, many_grads) = losses.values()
    assert many == pytest.approx(one, rel=1e-5) and one > 0
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5), many_grads, one_grads)


@pytest.mark.compilers
@pytest.mark.parametrize("name, axes", [
    pytest.param("a100-80gb", (-1, 8, 1), marks=pytest.mark.release), ("a100-80gb", (1, 32, 1)),
    ("a100-80gb", (2, 4, 4)), ("tpu-v5p", (-1, 8, 1)),
])
def test_the_update_of_the_7b_config_compiled_for_its_target(name, axes):
    target = TARGETS[name]
    if missing := missing_compilers(target):
        pytest.skip(f"needs {' and '.join(missing)}")
    overrides = [f"generator.mesh.{axis}={size}" for axis, size in zip(("data", "fsdp", "tensor"), axes, strict=True)]
    config = load_config("configs/qwen2_5_math_7b.py", overrides)
    devices = open_devices(target, 32)
    job = make_job(config, devices, target.per_host)
    policy, batch = job.policies["generator"], job.policies["generator"].batch
    lowered = lowered_functions(job, "generator")["update"]()
    compiled = lowered.compile(compiler_options=devices.compiler_options or None)
    program = examine(compiled)
    (_, _, Q, X), (_, _, R, T) = batch.prefix_token_NZQX.shape, batch.token_NZRT.shape
    need = needed(policy.model_config, policy.placement.train, MicroBatchShape(R, T, Q, X), 512)
    # One micro-batch, the worst case: what is sent once for all of them then counts in full.
    found = wire_bytes_by_kind(collectives(compiled.as_text(), 32), passes=1)
    print(name, axes, {kind: f"{need.get(kind, 0) / 1e9:.2f} GB needed, {found.get(kind, 0) / 1e9:.2f} GB found"
                 for kind in need | found})
    assert all(size <= ALLOWED * need[kind] + 1e6 for kind, size in found.items())
    beside, gathers = gathers_beside_products(compiled.as_text())
    print(f"{beside} of {gathers} gathers of layers lie beside products")
    assert beside == 0 or target.platform == "gpu"  # as estimates.py has it
    if axes == (1, 32, 1):  # those of the configuration
        assert beside / gathers == HIDDEN_IN_UPDATES
    assert program.argument + program.added < target.memory
