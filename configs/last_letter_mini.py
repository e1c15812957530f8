"""Last-letter concatenation on 4 and 5 words: a run of two minutes, for trying a change to the method.

After stage 1 the generator writes its steps in tags and solves 0.18 of the held-out problems. All verdicts are valid,
and step macro-F1 is 0.80. Both roles can still improve, and arms differ.

Command:   python -m tango_jax.train --config=configs/last_letter_mini.py --workdir=runs/last_letter_mini
           python -m tango_jax.ablate --config=last_letter_mini --workdir=runs/mini_arms
Hardware:  any CPU with two cores and 4 GiB of memory; nothing is downloaded.
Time:      about 2 minutes on two cores, two thirds of it stage 1. Further runs of `ablate` share stage 1, and take 15
           seconds each.
Expected:  generator accuracy 0.18 to between 0.78 and 0.96, verifier step macro-F1 0.80 to 0.99, outcome macro-F1 0.83
           to 0.99. results/last_letter_mini.md has other arms, seeds and runs without a warm-up.
"""

from ml_collections import ConfigDict

from tango_jax.cli.config_file import load_shipped
from tango_jax.tasks.last_letter import longest_texts

WORDS, LETTERS = 5, 4  # of the longest problem


def get_config() -> ConfigDict:
    """The quickstart's models on shorter problems, with a verifier that already reads when RL begins."""
    config = load_shipped("last_letter")
    task = config.task
    task.data_seed = 13  # settings were chosen on 11 and 12
    task.sft_words, task.rl_words, task.verifier_words = (2, WORDS), (4, WORDS), (2, 3)
    task.sft_letters = task.rl_letters = task.test_letters = (3, LETTERS)
    # Below one half, most letters are read right; at 0.5, step F1 begins near chance. With fewer random claims, the
    # verifier takes longer to learn to compare what it reads with what a step says.
    task.reading_error, task.claim_noise = 0.45, 0.3
    generator, verifier, longest = config.generator, config.verifier, longest_texts(WORDS, LETTERS)
    prompt, response = longest["generator prompt"], longest["generator response"]
    generator.max_prompt, generator.max_response = prompt, response + 5
    generator.row_buckets = (8, 48)  # a solution a prompt in the verifier's turns, six in its own
    generator.sft.pack_length, generator.sft.steps = prompt + response, 300
    prompt, response = longest["verifier prompt"], longest["verifier response"]
    verifier.max_prompt, verifier.max_response = prompt + 5, response + 8
    verifier.prompt_buckets, verifier.row_buckets = (), (48,)
    verifier.sft.pack_length, verifier.sft.steps = prompt + response, 400
    # At the quickstart's 32 examples and 2e-3, it does not learn the comparison within 400 steps.
    verifier.sft.batch_size, verifier.sft.rows_per_micro_batch, verifier.sft.optimizer.lr = 48, 8, 3e-3
    for role in (generator, verifier):
        role.rows_per_micro_batch, role.prompts_per_micro_batch = 24, 4
    config.rl.prompts_per_step, config.rl.samples_per_prompt = 8, 6
    config.rl.generator_steps, config.rl.warmup_steps = 24, 6
    config.rl.alpha_schedule = "none"  # step rewards count for half throughout, so that a change of them shows
    config.eval.every, config.eval.problems, config.eval.pool = 3, 144, 96
    return config
