"""Stage-1 batches: packed token ids and per-token loss weights of examples to imitate."""

import math
import sys

import jax
import numpy as np

from tango_jax.records import Batch, Problem, Solution, Verification
from tango_jax.rl.packing import TrainSequence, pack, sft_pack_shape
from tango_jax.rl.policy import Policy
from tango_jax.runtime import hosts
from tango_jax.sharding.layouts import place_batch
from tango_jax.tasks.task import SftExample, Task
from tango_jax.text.prompts import OWN, PROMPTS, prompt_ids, solution_of, verification_of


def sft_sequence(policy: Policy, example: SftExample) -> tuple[list[int], np.ndarray, bool]:
    """(prompt ids, response ids, whether both are complete). What is too long is cut off."""
    prompt_kind = PROMPTS[example.prompt] if example.prompt else OWN[policy.role]
    limit = policy.config.max_prompt if policy.role == "verifier" or example.verification else sys.maxsize
    prompt, is_shortened = prompt_ids(prompt_kind, policy.template, policy.tokenizer, _about(example), limit)
    room = max(0, sft_pack_shape(policy.config).row_length - len(prompt))
    response = policy.tokenizer.encode_response(example.response)
    return prompt, np.array(response[:room], np.int32), not is_shortened and len(response) <= room


def _about(example: SftExample) -> Problem | Solution | Verification:
    if not example.solution:
        return example.problem
    if not example.verification:
        return solution_of(example.problem, example.solution, example.num_steps)
    return verification_of(example.problem, example.solution, example.verification, example.num_steps)


def sft_pairs(policy: Policy, task: Task, split: str, start: int, count: int) -> list[tuple[list[int], np.ndarray]]:
    """Without incomplete examples: a verifier should not learn to judge steps that it cannot see."""
    examples = (task.sft_example(policy.role, split, index) for index in range(start, start + count))
    sequences = (sft_sequence(policy, example) for example in examples)
    return [(prompt, response) for prompt, response, is_whole in sequences if is_whole]


def pack_pairs(policy: Policy, pairs: list[tuple[list[int], np.ndarray]], most: int) -> Batch:
    """At most `most` examples, of which this process packs its share; every response token has the same weight (token
    mean)."""
    weight = np.float32(1.0 / max(1, sum(len(response) for _, response in pairs)))
    sequences = [
        TrainSequence(prompt=prompt, response=response, weight=np.full(len(response), weight))
        for prompt, response in hosts.own_part(pairs)
    ]
    placement = policy.placement
    own_most = math.ceil(most / jax.process_count())
    batch = pack(sequences, sft_pack_shape(policy.config), own_most, num_shards=placement.num_local_shards)
    return place_batch(placement, batch)


def sft_batch(
    policy: Policy, task: Task, split: str, start: int, count: int, rehearsed: Policy | None = None
) -> tuple[Batch, int]:
    """A packed batch, and how many examples were left out. A `rehearsed` generator's are added if they fit into a
    row."""
    pairs = sft_pairs(policy, task, split, start, count)
    most = count * (2 if rehearsed else 1)
    if rehearsed:
        row_length = sft_pack_shape(policy.config).row_length
        others = sft_pairs(rehearsed, task, split, start, count)
        pairs += [pair for pair in others if sum(map(len, pair)) <= row_length]
    return pack_pairs(policy, pairs, most), most - len(pairs)


def heldout_batch(policy: Policy, task: Task) -> tuple[Batch, int]:
    """A batch, and how many examples were left out. Of the policy's role alone, also where its batches have examples of
    both. Raises ValueError if none fits."""
    role, count, row_length = policy.role, policy.config.sft.eval_examples, sft_pack_shape(policy.config).row_length
    batch, left_out = sft_batch(policy, task, "heldout", 0, count)
    if left_out == count:
        raise ValueError(f"none of the first {count} held-out examples of the {role}'s stage 1 fits within its limits "
                         f"({role}.max_prompt={policy.config.max_prompt}, rows of {row_length} tokens): raise "
                         f"{role}.max_prompt or {role}.sft.pack_length")
    return batch, left_out
