"""A small model and three prompts with two responses each, packed for an update.

`plain_logps` scores one sequence a row: what scoring, packing and updates are compared with.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from tango_jax.config import default_config
from tango_jax.models import transformer
from tango_jax.models.attention import make_packed_attention
from tango_jax.models.transformer import ModelConfig
from tango_jax.rl.packing import PackShape, TrainSequence, pack
from tango_jax.rl.score import make_score

MODEL = ModelConfig(
    vocab_size=20, width=12, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=6, mlp_width=16, remat="none"
)
TEMPERATURE = 0.7
# Three prompts with two responses each; the prompt of one token leaves no shared prefix.
PROMPTS = ([5, 6, 7], [8, 9, 10, 11, 12, 13], [14])
LENGTHS = (4, 2, 6, 1, 3, 5)
TOKENS = sum(LENGTHS)
B, N_MAX = len(LENGTHS), max(LENGTHS)
RESPONSES = [np.random.default_rng(b).integers(0, 20, n).astype(np.int32) for b, n in enumerate(LENGTHS)]
IS_ACTION_BN = np.arange(N_MAX)[None, :] < np.array(LENGTHS)[:, None]

# Rows of 14 tokens, two a micro-batch, scored 7 tokens at a time: the batch that most tests look at.
SHAPE, CHUNK = PackShape(row_length=14, rows=2), 7


def random_params(seed=0):
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: transformer.init_params(MODEL, jax.random.key(0)))
    return jax.tree.map(lambda leaf: (0.5 * rng.normal(size=leaf.shape)).astype(np.float32), shapes)


PARAMS = random_params()


def prompt_of(b):
    return PROMPTS[b // 2]


def plain_logps(params):
    """What each response token is drawn from and its own log-prob, [B, N_MAX, V] and [B, N_MAX]: one sequence a row."""
    length = max(map(len, PROMPTS)) + N_MAX
    rows = [[*prompt_of(b), *RESPONSES[b]] for b in range(B)]
    token_BT = np.array([row + [0] * (length - len(row)) for row in rows])
    segment_BT = np.array([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    position_BT = np.tile(np.arange(length), (B, 1))
    attend_fn = make_packed_attention(jnp.asarray(segment_BT))
    x_BTD = transformer.forward(MODEL, params, token_BT, position_BT, attend_fn)
    head_DV = transformer.head_matrix(MODEL, params)
    logits_BTV = transformer.logits_from_hidden(MODEL, params["final_norm"], head_DV, x_BTD) / TEMPERATURE
    logps_BTV = logits_BTV - jnp.log(jnp.exp(logits_BTV).sum(-1, keepdims=True))
    row_B1 = np.arange(B)[:, None]
    at_BN = np.array([[len(prompt_of(b))] for b in range(B)]) + np.arange(N_MAX)[None, :]
    logps_BNV = logps_BTV[row_B1, at_BN - 1]
    logp_BN = logps_BNV[row_B1, np.arange(N_MAX)[None, :], token_BT[row_B1, at_BN]]
    return logps_BNV, jnp.where(IS_ACTION_BN, logp_BN, 0.0)


def by_response(flat):
    """Values of all action tokens, one after the other, as [B, N_MAX]."""
    table = np.zeros((B, N_MAX), np.float32)
    table[IS_ACTION_BN] = flat
    return table


def make_data() -> dict[str, np.ndarray]:
    """Numbers of every action token, [B, N_MAX] each; old, sampler and reference a little off the policy."""
    rng, logp_BN = np.random.default_rng(1), np.asarray(jax.jit(plain_logps)(PARAMS)[1])

    def near(spread):
        return by_response(logp_BN[IS_ACTION_BN] + spread * rng.normal(size=TOKENS))

    return {
        "weight": by_response(rng.uniform(0.02, 0.08, TOKENS)), "adv": by_response(rng.normal(size=TOKENS)),
        "sampler": near(0.1), "old": near(0.3), "ref": near(0.5),
    }


def make_batch(data, shape=SHAPE, chosen=range(B), one_a_row=False):
    """The chosen sequences, packed; old and reference log-probs go the way that the sampler's take."""
    def packed(name):
        sequences = [
            TrainSequence(prompt_of(b), RESPONSES[b], *(data[key][b, : LENGTHS[b]] for key in ("weight", "adv", name)))
            for b in chosen
        ]
        if not one_a_row:
            return pack(sequences, shape, max_sequences=B, max_prompts=3)
        parts = [pack([sequence], shape, 1) for sequence in sequences]
        whole = jax.tree.map(lambda *leaves: np.concatenate(leaves) if leaves[0].ndim else sum(leaves), *parts)
        return whole.replace(num_micro=np.int32(whole.num_micro))

    old, ref = packed("old").sampler_logp_NZRT, packed("ref").sampler_logp_NZRT
    return packed("sampler").replace(old_logp_NZRT=old, ref_logp_NZRT=ref)


@functools.cache
def score_fn(chunk=CHUNK):
    return make_score(MODEL, TEMPERATURE, chunk)


def tiny_role():
    config = default_config().generator
    model = dataclasses.asdict(MODEL)
    for name in config.model:
        config.model[name] = model[name]
    config.max_prompt, config.max_response, config.row_buckets = 8, 6, (6,)
    config.temperature, config.rows_per_micro_batch, config.prompts_per_micro_batch = TEMPERATURE, 2, 2
    return config
