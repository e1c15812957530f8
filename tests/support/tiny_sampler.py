"""A model of two layers with random weights, for tests of sampling."""

import jax
import numpy as np

from tango_jax.models import transformer
from tango_jax.models.transformer import ModelConfig
from tango_jax.runtime.ahead import CompileAhead

MODEL = ModelConfig(
    vocab_size=70, width=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, mlp_width=24,
    remat="none",
)
STOP_IDS = (1, 2, 3, 4, 5, 6, 7)
FLOAT = dict(rtol=1e-4, atol=1e-4)


def random_params(model: ModelConfig = MODEL):
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: transformer.init_params(model, jax.random.key(0)))

    def leaf(path, shape):
        is_norm = path[-1].key.endswith("norm")
        return (is_norm + (0.3 if is_norm else 0.6) * rng.normal(size=shape.shape)).astype(np.float32)

    params = jax.tree_util.tree_map_with_path(leaf, shapes)
    params["embed"] *= 0.7
    return params


def compile_now(sampler, weights, group_sizes):
    """All that requests with these group sizes can need."""
    with CompileAhead() as ahead:
        sampler.driver.compile_ahead(ahead, weights, group_sizes)


def assert_same(left, right, rows=slice(None)):
    """Equal tokens, and log-probs that are equal to rounding."""
    for a, b in zip(left.tokens[rows], right.tokens[rows], strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(left.logps[rows], right.logps[rows], strict=True):
        np.testing.assert_allclose(a, b, **FLOAT)
    np.testing.assert_array_equal(left.is_truncated_B[rows], right.is_truncated_B[rows])
