"""The plan's figures for small models against what runs here: memory within 20 %, FLOPs within 5 %."""
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from support.paths import ROOT, TESTS
from support.processes import HANG_S
from tango_jax.config import default_config
from tango_jax.models.transformer import ModelConfig
from tango_jax.planning import costs
from tango_jax.planning.costs import MicroBatchShape
from tango_jax.planning.job import sized
from tango_jax.planning.sources import blank_tokenizer
from tango_jax.rl.policy import make_policy
from tango_jax.weights.source import Source

GIB = 2**30


@pytest.mark.long
@pytest.mark.release
def test_memory_of_a_run_is_what_the_plan_says():
    # One device, and programs as users have them.
    environment = {name: value for name, value in os.environ.items()
                   if name not in ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")}
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{TESTS}"
    done = subprocess.run([sys.executable, "-m", "support.plan_measured"], cwd=ROOT, env=environment, text=True,
                          capture_output=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    print({name: [f"{size / GIB:.3f} GiB" for size in pair] for name, pair in figures.items()})
    assert set(figures) == {"sft", "reshard", "sample", "score", "update"}
    for name, (predicted, measured) in figures.items():
        assert predicted == pytest.approx(measured, rel=0.2), name


def small_policy(remat: str, rows: int):
    """Unrolled, so that XLA counts every layer; log-probs in one piece for the same reason."""
    model = ModelConfig(
        vocab_size=2048, width=256, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64, mlp_width=1024,
        remat=remat, unroll=True, attention="xla",
    )
    config = default_config().generator
    config.max_prompt, config.max_response, config.row_buckets = 256, 255, (rows,)
    config.rows_per_micro_batch, config.prompts_per_micro_batch, config.mesh.fsdp = 2, 1, 1
    return make_policy("generator", config, Source("", model, blank_tokenizer(model), None, lambda folder: None, {}))


def counted(lowered) -> float:
    # Machine code is not run: the least effort for it.
    return lowered.compile({"xla_backend_optimization_level": 0}).cost_analysis()["flops"]


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_flops_of_an_update(remat):
    policy, rl = small_policy(remat, rows=10), default_config().rl
    rl.prompts_per_step = 2
    # One micro-batch: XLA counts the body of the loop over them once.
    tokens = MicroBatchShape(rows=2, row_length=256, prefixes=1, prefix_length=256)
    expected = costs.update_flops(policy.model_config, tokens, 1, "xla", is_chunked=False).total
    flops = counted(policy.update.lower(policy.abstract_state(), sized(policy, rl, 1).batch))
    print(f"{remat}: {expected:.4e} by arithmetic, {flops:.4e} counted, {expected / flops:.3f}")
    assert expected == pytest.approx(flops, rel=0.05)


def test_flops_of_scoring_and_sampling():
    policy, rl = small_policy("full", rows=10), default_config().rl
    rl.prompts_per_step = 2
    model, sampling = policy.model_config, sized(policy, rl, 1).sampling
    sampler, params = policy.sampler, policy.abstract_state().params
    tokens = MicroBatchShape(rows=2, row_length=256, prefixes=1, prefix_length=256)
    state, batch = sampling.states[-1], sized(policy, rl, 1).batch
    for name, expected, lowered in (
        ("score", costs.score_flops(model, tokens, 1, "xla"), policy.score.lower(params, batch)),
        ("prefill", costs.prefill_flops(model, 10, 256, 1, "xla"), sampler.driver.prefill_fn.lower(*sampling.prefill)),
        ("decode", costs.decode_flops(model, 10, 256 + 255, 1),  # the loop over steps counts once, too
         sampler.driver.decode_fn.lower(sampling.weights, state, sampling.params, np.int32(0))),
    ):
        flops = counted(lowered)
        print(f"{name}: {expected.total:.4e} by arithmetic, {flops:.4e} counted, {expected.total / flops:.3f}")
        assert expected.total == pytest.approx(flops, rel=0.05), name


def test_flops_by_hand():
    # D=4, H=2, K=1, E=2, F=6, L=1, V=10: a layer 2 * (4*2*(2+2) + 2*2*4 + 3*4*6) = 240 a token, a pair 4 * 2 * 2 = 16.
    model = ModelConfig(vocab_size=10, width=4, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=2, mlp_width=6)
    tokens = MicroBatchShape(rows=1, row_length=3, prefixes=1, prefix_length=2)  # 5 tokens, 3 of them scored
    assert tokens.pairs("xla") == 2 * 2 + 3 * (2 + 3)
    assert MicroBatchShape(rows=1, row_length=97).pairs("xla") == 49 * 49 + 48 * 97  # two blocks
    assert tokens.pairs("splash") == 3 + 3 * 2 + 6  # the prompt's triangle; rows see the prompt and their own triangle
    assert tokens.pairs("cudnn") == 3 + 3 * (2 + 3)  # all of a row that continues a prompt
    assert MicroBatchShape(rows=1, row_length=3).pairs("cudnn") == 6
    forward = costs.score_flops(model, tokens, 1, "xla")
    assert forward == (5 * 240 + 19 * 16, 3 * 80)
    # Again with remat: all but the last product, 5 tokens x 2 * 4 * 6; the head a fourth time where it is chunked.
    update = costs.update_flops(model, tokens, 1, "xla", is_chunked=True)
    assert update == (4 * forward.layers - 5 * 48, 4 * forward.head)


def test_bytes_by_hand():
    # As above: 120 weights a layer, 40 of the head; keys and values of a token 2 * 1 * 1 * 2 numbers.
    model = ModelConfig(vocab_size=10, width=4, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=2, mlp_width=6,
                        compute_dtype="bfloat16")
    assert costs.weight_bytes(model, tensor=1) == 2 * 120 + 4 * 40  # the head is float32
    assert costs.weight_bytes(model, tensor=2) == 2 * 60 + 4 * 20
    assert costs.weight_bytes(model, tensor=4) == 2 * 30 + 4 * 40  # 4 does not divide the vocabulary
    assert costs.cached_token_bytes(model, tensor=1) == 2 * 4
    assert costs.optimizer_bytes(state=3000, params=1000) == 8000
