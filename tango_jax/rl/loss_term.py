"""A user's addition to the loss of a role: `ROLE.loss.term` names a function that jax traces,

    term(tokens) -> loss_BT                 tokens: a LossTokens (losses.py); weighted and summed as the loss is
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from tango_jax.rl.losses import LossTokens
from tango_jax.runtime.checks import shortened
from tango_jax.runtime.user_code import load_function


def load_loss_term(role: str, loss: ConfigDict) -> Callable[[LossTokens], jax.Array] | None:
    """The function, tried on the shapes of a small batch. Raises ValueError: it cannot be loaded, fails when traced, or
    returns another shape."""
    if not loss.term:
        return None
    function = load_function(f"{role}.loss.term", loss.term, ("tokens",))

    def term_fn(tokens: LossTokens) -> jax.Array:
        loss_BT = function.call(tokens)
        if jnp.shape(loss_BT) != tokens.logp_BT.shape or not jnp.issubdtype(jnp.result_type(loss_BT), jnp.floating):
            function.refuse(f"it returned {shortened(loss_BT)}; it must return a float for each token, "
                            f"{list(tokens.logp_BT.shape)}")
        return loss_BT

    float_BT, bool_BT = (jax.ShapeDtypeStruct((2, 5), dtype) for dtype in (jnp.float32, jnp.bool_))
    jax.eval_shape(term_fn, LossTokens(*[float_BT] * 6, bool_BT))
    return term_fn
