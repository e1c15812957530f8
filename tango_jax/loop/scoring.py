"""Log-probs of whole texts by the trainer, and a verifier's marks that are read from them in one pass."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tango_jax.loop.breakdown import Broken
from tango_jax.method.texts import build_prompts, make_verification, rollout_metrics, with_parents
from tango_jax.method.turn import MAX_SCORED_TOKENS
from tango_jax.records import Responses, Rollout, Solution
from tango_jax.rl.packing import action_mask, pack_minibatch
from tango_jax.rl.policy import Policy
from tango_jax.runtime import hosts
from tango_jax.text.mark_rows import mark_row
from tango_jax.text.prompts import Prompt


def response_logps(policy: Policy, weights: Any, responses: Responses) -> np.ndarray:
    """Of every action, float32 [B, T]; 0 elsewhere. All processes must call this."""
    is_action_BT = action_mask(policy.config, responses.rollout)
    assert is_action_BT.size < MAX_SCORED_TOKENS, is_action_BT.size  # method/load.py
    # Token indices are packed in the field of the advantages, and undo the packing below.
    place_BT = np.arange(1, 1 + is_action_BT.size, dtype=np.float32).reshape(is_action_BT.shape)
    parts = []
    for number in range(policy.config.loss.minibatches):
        batch = pack_minibatch(policy.config, policy.placement, number, responses, place_BT, is_action_BT)
        scored = _own_shards(policy.score(weights, batch))
        parts += zip(_own_shards(batch.adv_NZRT), _own_shards(batch.is_action_NZRT), scored, strict=True)
    logp = np.zeros(1 + is_action_BT.size, np.float32)
    for token_place, is_action, logp_part in hosts.join_parts(parts):
        logp[token_place[is_action].astype(int)] = logp_part[is_action]
    return logp[1:].reshape(is_action_BT.shape)


def _own_shards(array: jax.Array | np.ndarray) -> list[np.ndarray]:
    if isinstance(array, np.ndarray):
        return [array]
    shards = sorted(array.addressable_shards, key=lambda shard: shard.device.id)
    return [np.asarray(shard.data) for shard in shards]


def read_marks(
    policy: Policy, weights: Any, prompt: Prompt, parents: Sequence[Solution], samples: int, key_data: np.ndarray,
    most: int,
) -> Responses:
    """`samples` verifications of each solution, whose marks are read in one pass over `mark_rows.mark_row`. One has the
    likelier mark of each step; several are drawn, each mark by its probability alone. `most`: solutions of any call.

    All processes read their share, and each makes all verifications. Raises Broken in every process if logits are not
    finite.
    """
    prompts, is_cut = build_prompts(policy, prompt, parents)
    row_of = {count: mark_row(policy.tokenizer, count, policy.config.max_response)
              for count in {len(one.steps) for one in parents}}
    rows = [row_of[len(one.steps)] for one in parents]

    def rollout_of(logps: Sequence[np.ndarray], samples: int) -> Rollout:
        rows_B = [row for row in rows for _ in range(samples)]
        is_cut_B = np.array([row.is_cut for row in rows_B], bool)
        return Rollout(tuple(row.tokens for row in rows_B), tuple(logps), is_cut_B, decode_steps=0, row_steps=0,
                       others=tuple(row.other for row in rows_B))

    unread = rollout_of([np.zeros(len(row.tokens), np.float32) for row in rows], 1)
    once = Responses(prompt.role, parents, prompts, 1, unread, list(parents), {}, prompt.name, most)
    logp_PT = response_logps(policy, weights, once)
    if not np.isfinite(logp_PT).all():
        raise Broken(policy.role, f"cannot score with the {policy.role}: the logits are NaN or infinite")
    logps = [logp_T[: len(row.tokens)] for logp_T, row in zip(logp_PT, rows, strict=True)]
    owners, records = [parent for parent in parents for _ in range(samples)], []
    for b, owner in enumerate(owners):
        row, p_steps = rows[b // samples], np.exp(logps[b // samples][rows[b // samples].other >= 0])
        text, ends = row.text, row.ends
        if not row.is_cut:
            limits = np.full(len(p_steps), 0.5) if samples == 1 else np.random.default_rng([*key_data, b]).random(
                len(p_steps))
            text, ends = row.written((p_steps >= limits).tolist())
        record = make_verification(owner, text, ends, row.is_cut)
        records.append(dataclasses.replace(record, p_steps=tuple(map(float, p_steps))))
    rollout = rollout_of([logp_T for logp_T in logps for _ in range(samples)], samples)
    metrics = rollout_metrics(prompt.name, rollout, prompts)
    metrics |= {f"{prompt.name}/prompts_shortened": sum(is_cut), f"{prompt.name}/shortened_rate": np.mean(is_cut)}
    return Responses(prompt.role, parents, prompts, samples, rollout, with_parents(records, owners), metrics,
                     prompt.name)
