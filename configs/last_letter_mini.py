"""x"""

from ml_collections import ConfigDict

from tango_jax.cli.config_file import load_shipped
from tango_jax.tasks.last_letter import longest_texts

WORDS, LETTERS = 5, 4  # of the longest problem


def get_config() -> ConfigDict:
    config = load_shipped("last_letter")
    task = config.task
    task.data_seed = 13
    task.sft_words, task.rl_words, task.verifier_words = (2, WORDS), (4, WORDS), (2, 3)
    task.sft_letters = task.rl_letters = task.test_letters = (3, LETTERS)
    task.reading_error, task.claim_noise = 0.45, 0.3
    generator, verifier, longest = config.generator, config.verifier, longest_texts(WORDS, LETTERS)
    prompt, response = longest["generator prompt"], longest["generator response"]
    generator.max_prompt, generator.max_response = prompt, response + 5
    generator.row_buckets = (8, 48)
    generator.sft.pack_length, generator.sft.steps = prompt + response, 300
    prompt, response = longest["verifier prompt"], longest["verifier response"]
    verifier.max_prompt, verifier.max_response = prompt + 5, response + 8
    verifier.prompt_buckets, verifier.row_buckets = (), (48,)
    verifier.sft.pack_length, verifier.sft.steps = prompt + response, 400
    verifier.sft.batch_size, verifier.sft.rows_per_micro_batch, verifier.sft.optimizer.lr = 48, 8, 3e-3
    for role in (generator, verifier):
        role.rows_per_micro_batch, role.prompts_per_micro_batch = 24, 4
    config.rl.prompts_per_step, config.rl.samples_per_prompt = 8, 6
    config.rl.generator_steps, config.rl.warmup_steps = 24, 6
    config.rl.alpha_schedule = "none"
    config.eval.every, config.eval.problems, config.eval.pool = 3, 144, 96
    return config
