"""The policies of a configuration, which are one where its arm or its adapter says so."""

from ml_collections import ConfigDict

from tango_jax.method.own_arm import shares_policy
from tango_jax.rl.policy import Policy, make_policies


def policies_of(config: ConfigDict) -> dict[str, Policy]:
    return make_policies(config, shares_policy(config))
