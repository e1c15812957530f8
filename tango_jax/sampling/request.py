"""What a sampler takes, and checks of its input and output."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from tango_jax.sampling.decode import PromptBatch, RowStart
from tango_jax.text.tokenizer import PAD_ID


@dataclasses.dataclass(frozen=True)
class SampleRequest:
    """M responses to each of P prompts, B = P x M rows in all, prompt-major."""

    prompts: Sequence[Sequence[int]]  # P lists of token ids
    group_size: int  # M
    key_data: np.ndarray  # uint32[2]
    temperature: float  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 switches the filter off
    # New tokens allowed, for all rows or int[B]. None, and whatever is larger, means the last cache bucket.
    max_new: int | Sequence[int] | np.ndarray | None = None
    # int[B]. A row's randomness depends on the key and on its number alone, never on the batch around it. None: 0..B-1.
    row_numbers: Sequence[int] | np.ndarray | None = None
    # Called on the host between two decode loops with the number of ended rows: shows progress.
    ended_fn: Callable[[int], None] = lambda ended: None


def check_request(request: SampleRequest, max_prompt: int) -> None:
    """ValueError: no prompt, an empty or too long one, or a limit below 1."""
    prompts, max_new = request.prompts, request.max_new
    if not len(prompts) or (max_new is not None and np.min(max_new) < 1):
        raise ValueError(f"the sampler needs a prompt (it got {len(prompts)}) and a new token (max_new={max_new})")
    for index, prompt in enumerate(prompts):
        if not 0 < len(prompt) <= max_prompt:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens; the sampler takes 1 to {max_prompt} (its last prompt "
                "bucket): shorten the prompt or raise max_prompt"
            )


def with_row_arrays(request: SampleRequest, longest: int) -> SampleRequest:
    """Gives every row its limit, at most `longest`, and its number."""
    num_rows = len(request.prompts) * request.group_size
    limit_B = np.broadcast_to(longest if request.max_new is None else request.max_new, (num_rows,))
    number_B = np.arange(num_rows) if request.row_numbers is None else np.asarray(request.row_numbers)
    assert number_B.shape == (num_rows,), (number_B.shape, num_rows)
    return dataclasses.replace(request, max_new=np.minimum(limit_B, longest), row_numbers=number_B)


def reordered(request: SampleRequest, order_P: np.ndarray, row_B: np.ndarray) -> SampleRequest:
    prompts = [request.prompts[index] for index in order_P]
    return dataclasses.replace(
        request, prompts=prompts, max_new=request.max_new[row_B], row_numbers=request.row_numbers[row_B]
    )


def pad_request(request: SampleRequest, num_prompts: int, prompt_bucket: int) -> PromptBatch:
    """Rows that only fill the batch may generate nothing."""
    token_PX = np.full((num_prompts, prompt_bucket), PAD_ID, np.int32)
    length_P = np.ones((num_prompts,), np.int32)
    for p, prompt in enumerate(request.prompts):
        token_PX[p, : len(prompt)] = prompt
        length_P[p] = len(prompt)
    padding = (0, num_prompts * request.group_size - len(request.row_numbers))
    return PromptBatch(
        token_PX=token_PX,
        length_P=length_P,
        rows=RowStart(
            limit_B=np.pad(request.max_new, padding).astype(np.int32),
            number_B=np.pad(request.row_numbers, padding).astype(np.int32),
            key_data=request.key_data,
        ),
    )


def check_finite(logps: Sequence[np.ndarray], temperature: float) -> None:
    """Raise FloatingPointError if log-probs are not finite."""
    broken = [b for b, row in enumerate(logps) if not np.isfinite(row).all()]
    if broken:
        raise FloatingPointError(
            f"the logits are NaN or infinite at new token {len(logps[broken[0]])} of row {broken[0]}, and in "
            f"{len(broken)} of {len(logps)} rows in all (temperature {temperature:g}): the weights hold values that "
            "are not finite or too large, or the temperature is too small"
        )
