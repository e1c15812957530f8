"""What all processes sampled, from what each did."""

from collections.abc import Sequence

import numpy as np

from tango_jax.records import Rollout, Solution, Verification
from tango_jax.runtime import hosts

Records = Sequence[Solution | Verification]


def gather(records: Records, rollout: Rollout) -> tuple[list[Solution | Verification], Rollout]:
    """All processes' records and rollouts, in order, in one exchange; all must call this. Numbers of tokens travel as
    the bytes of their arrays: an object for each of millions of tokens would take seconds."""
    shares = hosts.join_parts([(list(records), rollout)])
    rollouts = [rollout for _, rollout in shares]
    return [record for records, _ in shares for record in records], Rollout(
        tokens=tuple(tokens for one in rollouts for tokens in one.tokens),
        logps=tuple(logps for one in rollouts for logps in one.logps),
        is_truncated_B=np.concatenate([one.is_truncated_B for one in rollouts]),
        decode_steps=max(one.decode_steps for one in rollouts),
        row_steps=sum(one.row_steps for one in rollouts),
    )
