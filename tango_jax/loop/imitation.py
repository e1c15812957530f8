"""Examples of stage 1 as batches: text to imitate in; packed token ids with the weight of every response token out."""

import math

import jax
import numpy as np

from tango_jax.records import Batch
from tango_jax.rl.packing import TrainSequence, pack, sft_pack_shape
from tango_jax.rl.policy import Policy
from tango_jax.runtime import hosts
from tango_jax.sharding.layouts import place_batch
from tango_jax.tasks.task import SftExample, Task
from tango_jax.text.templates import generator_prompt, verifier_prompt


def sft_sequence(policy: Policy, example: SftExample) -> tuple[list[int], np.ndarray, bool]:
    """(prompt ids, response ids, whether both are whole) of one example.

    A verifier's prompt loses the end of a solution that is too long for it, and a response what is beyond the row.
    """
    is_shortened = False
    if policy.role == "generator":
        prompt = generator_prompt(policy.template, policy.tokenizer, example.problem)
    else:
        prompt, is_shortened = verifier_prompt(
            policy.template,
            policy.tokenizer,
            example.problem,
            example.solution,
            example.num_steps,
            policy.config.max_prompt,
        )
    room = max(0, sft_pack_shape(policy.config).row_length - len(prompt))
    response = policy.tokenizer.encode_response(example.response)
    return prompt, np.array(response[:room], np.int32), not is_shortened and len(response) <= room


def sft_pairs(policy: Policy, task: Task, split: str, start: int, count: int) -> list[tuple[list[int], np.ndarray]]:
    """(prompt ids, response ids) of examples start .. start + count of a split, without those that are not whole: to
    judge steps that it cannot see is nothing that a verifier should learn."""
    examples = (task.sft_example(policy.role, split, index) for index in range(start, start + count))
    sequences = (sft_sequence(policy, example) for example in examples)
    return [(prompt, response) for prompt, response, is_whole in sequences if is_whole]


def pack_pairs(policy: Policy, pairs: list[tuple[list[int], np.ndarray]], most: int) -> Batch:
    """At most `most` examples, packed; every response token has the same weight (token mean).

    Each process has all examples, for the weight, and packs its share.
    """
    weight = np.float32(1.0 / max(1, sum(len(response) for _, response in pairs)))
    sequences = [
        TrainSequence(prompt=prompt, response=response, weight=np.full(len(response), weight))
        for prompt, response in hosts.own_part(pairs)
    ]
    placement = policy.placement
    own_most = math.ceil(most / jax.process_count())
    batch = pack(sequences, sft_pack_shape(policy.config), own_most, num_shards=placement.num_local_shards)
    return place_batch(placement, batch)


def heldout_batch(policy: Policy, task: Task) -> Batch:
    role, count, row_length = policy.role, policy.config.sft.eval_examples, sft_pack_shape(policy.config).row_length
    pairs = sft_pairs(policy, task, "heldout", 0, count)
    if not pairs:
        raise ValueError(f"none of the first {count} held-out examples of the {role}'s stage 1 fits its limits "
                         f"({role}.max_prompt={policy.config.max_prompt}, rows of {row_length} tokens): raise "
                         f"{role}.max_prompt or {role}.sft.pack_length")
    return pack_pairs(policy, pairs, count)
