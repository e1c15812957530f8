"""Last-letter concatenation on long problems, where right answers are rare and the verifier's judgements matter.

Command:   python -m tango_jax.train --config=configs/last_letter_long.py --workdir=runs/last_letter_long
Hardware:  any CPU with two cores and 4 GiB of memory; nothing is downloaded.
Time:      half an hour on one core for stage 1, five minutes for the rest.
Expected:  greedy accuracy from 0.01 to between 0.4 and 1.0 within 60 generator steps, depending on the start.
           results/when_it_pays.md has all arms.
"""

from ml_collections import ConfigDict

from tango_jax.cli.config_file import load_shipped
from tango_jax.tasks.last_letter import longest_texts

WORDS, LETTERS = 16, 5  # of the longest problem of stage 1
RL_WORDS = 12  # of every problem of the generator's turns and of the test; see results/when_it_pays.md


def get_config() -> ConfigDict:
    """The quickstart's settings, but for longer problems, and a verifier that reads better when RL begins."""
    config = load_shipped("last_letter")
    task = config.task
    task.data_seed = 0
    task.sft_words, task.rl_words = (2, WORDS), (RL_WORDS, RL_WORDS)
    task.reading_error = 0.4
    generator, verifier, longest = config.generator, config.verifier, longest_texts(WORDS, LETTERS)
    prompt, response = longest["generator prompt"], longest["generator response"]
    generator.max_prompt, generator.max_response = prompt, response + 5
    generator.cache_buckets = (56,)
    generator.sft.pack_length, generator.sft.steps = prompt + response, 800
    prompt, response = longest["verifier prompt"], longest["verifier response"]
    verifier.max_prompt, verifier.max_response = prompt + 5, response + 8
    verifier.prompt_buckets, verifier.cache_buckets = (), (56, 112)
    verifier.sft.pack_length, verifier.sft.steps = prompt + response, 1300
    # The stored runs had another bucket of the verifier's prompts, 72, and one of its rows, 24.
    generator.row_buckets, verifier.row_buckets = (24, 48, 96), (48, 96)
    config.rl.generator_steps, config.rl.warmup_steps = 60, 12
    config.rollouts.every, config.checkpoint.every = 10, 20
    return config
