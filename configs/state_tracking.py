"""State tracking with two small transformers trained from scratch. Every step builds on the step before.

`configs/state_tracking.py:12` has problems of 2 to 12 swaps instead of 2 to 8. All lengths follow from that number. The
ranges `task.sft_swaps`, `task.rl_swaps` and `task.test_swaps` can have any numbers up to it.

Command:   python -m tango_jax.train --config=configs/state_tracking.py --workdir=runs/state_tracking
Hardware:  any CPU with two cores and 4 GiB of memory; nothing is downloaded.
Time:      on one core, ten minutes for stage 1 and a minute and a half for 60 steps of `grpo`.
Expected:  in one run from one start (task.data_seed 4), greedy accuracy of `grpo` from 0.24 to 1.0 within 42 generator
           steps. With true step labels it is no faster. results/family_state_tracking.md has more arms in a harder
           setting.
"""

from ml_collections import ConfigDict

from tango_jax.config import default_config
from tango_jax.tasks.state_tracking import longest_texts

MAX_SWAPS = 8


def set_lengths(config: ConfigDict, max_swaps: int) -> None:
    """Set the limits and buckets of both roles to what problems with this many swaps need."""
    longest, half = longest_texts(max_swaps), longest_texts((max_swaps + 1) // 2)
    step = {what: tokens - longest_texts(max_swaps - 1)[what] for what, tokens in longest.items()}
    for name, role in (("generator", config.generator), ("verifier", config.verifier)):
        prompt, response = f"{name} prompt", f"{name} response"
        role.max_prompt = longest[prompt]
        role.max_response = longest[response] + step[response]  # a response may be one step too long
        role.sft.pack_length = longest[prompt] + longest[response]
    config.generator.sft.pack_length = config.generator.sft.pack_length * 3 // 2  # more short examples fill a row
    # A sampled solution may be longer than the right one, up to its own limit.
    config.verifier.max_prompt += config.generator.max_response - longest["generator response"]
    config.verifier.prompt_buckets = (half["verifier prompt"],)


def get_config(argument: str = "") -> ConfigDict:
    if argument and not (argument.isdecimal() and int(argument) >= 2):
        raise ValueError(f"{argument!r} is not the largest number of swaps, which must be at least 2: write "
                         "state_tracking:12, or no argument")
    max_swaps = int(argument or MAX_SWAPS)
    config = default_config()
    config.task.name = "state_tracking"
    config.task.sft_swaps = config.task.rl_swaps = config.task.test_swaps = (2, max_swaps)
    set_lengths(config, max_swaps)
    for role in (config.generator, config.verifier):
        role.template = "plain"
        role.model.mlp_width = 256
        role.model.qk_norm = True
        role.model.remat = "none"
        role.model.unroll = True
        role.row_buckets = (25, 50, 100)
        role.sft.batch_size = 32
        role.sft.eval_examples = 64
        role.sft.optimizer.lr = 2e-3
        role.sft.optimizer.schedule = "cosine"
        role.sft.optimizer.warmup_steps = 50
        role.sft.optimizer.b2 = 0.98
        role.sft.max_heldout_loss = 0.1
        role.optimizer.lr = 1e-4
    config.generator.rows_per_micro_batch, config.generator.prompts_per_micro_batch = 8, 4
    config.generator.sft.rows_per_micro_batch = 8
    config.generator.sft.steps = 800
    config.verifier.rows_per_micro_batch, config.verifier.prompts_per_micro_batch = 6, 2
    config.verifier.sft.rows_per_micro_batch = 4
    config.verifier.sft.steps = 600
    config.verifier.sft.start = "generator"  # both roles share one base, like two checkpoints of a model family
    config.verifier.temperature = 0.7
    config.rl.prompts_per_step = 20
    config.rl.samples_per_prompt = 5
    config.rl.generator_steps = 60
    config.rl.warmup_steps = 10
    config.rl.alpha_initial = 0.5
    config.eval.every = 6
    return config
