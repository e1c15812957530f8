"""Last-letter concatenation with two small transformers trained from scratch: the whole method on a laptop.

Reinforcement learning has problems of exactly 8 words. The generator solves three in a hundred of them at first. The
verifier trains on 2 to 4 words. Its teacher in stage 1 misreads more than half of the hard letters, so the verifier
still has to learn to judge.

Command:   python -m tango_jax.train --config=configs/last_letter.py --workdir=runs/last_letter
Hardware:  any CPU with two cores and 4 GiB of memory; nothing is downloaded.
Time:      4 to 11 minutes on two cores, compiling included.
Expected:  seed 0: generator accuracy 0.03 to 0.90, verifier step macro-F1 0.46 to 1.00, outcome macro-F1 0.21 to 1.00.
           results/last_letter.md has all runs and the other arms.
"""

from ml_collections import ConfigDict

from tango_jax.config import default_config
from tango_jax.tasks.last_letter import longest_texts

WORDS, LETTERS = 8, 5  # of the longest problem


def get_config() -> ConfigDict:
    config = default_config()
    task = config.task
    task.data_seed = 4  # settings were chosen on 0, 1 and 3, so their held-out problems are not reported
    task.sft_words, task.rl_words, task.test_words = (2, WORDS), (WORDS, WORDS), ()
    task.sft_letters = task.rl_letters = task.test_letters = (3, LETTERS)
    # Outcomes on short problems are nearly balanced; of the long ones, the generator gets one in 100 right at first.
    task.verifier_words = (2, 4)
    task.hard_error, task.reading_error = 0.8, 0.55
    for role in (config.generator, config.verifier):
        role.template = "plain"
        role.model.mlp_width = 256
        # As in Qwen3. Without it, attention heads that must find a single letter train slowly and amplify rounding.
        role.model.qk_norm = True
        role.model.remat = "none"
        role.model.unroll = True
        role.sft.batch_size = 32
        role.sft.eval_examples = 64
        role.sft.optimizer.lr = 2e-3
        role.sft.optimizer.schedule = "cosine"
        role.sft.optimizer.warmup_steps = 50
        role.sft.optimizer.b2 = 0.98
        role.sft.max_heldout_loss = 0.1
        role.sft.steps = 400
    generator, verifier, longest = config.generator, config.verifier, longest_texts(WORDS, LETTERS)
    prompt, response = longest["generator prompt"], longest["generator response"]
    generator.max_prompt, generator.max_response = prompt, response + 5
    generator.row_buckets = (12, 96)  # few sizes, which take a second each to compile
    generator.rows_per_micro_batch, generator.prompts_per_micro_batch = 8, 4
    generator.sft.pack_length, generator.sft.rows_per_micro_batch = prompt + response, 8
    prompt, response = longest["verifier prompt"], longest["verifier response"]
    verifier.max_prompt, verifier.max_response = prompt + 5, response + 8
    verifier.prompt_buckets, verifier.row_buckets = (72,), (48, 96)
    verifier.rows_per_micro_batch, verifier.prompts_per_micro_batch = 6, 2
    verifier.sft.pack_length, verifier.sft.rows_per_micro_batch = prompt + response, 4
    verifier.sft.start = "generator"  # both roles share one base, like two checkpoints of a model family
    generator.optimizer.lr = verifier.optimizer.lr = 1e-4
    verifier.temperature = 0.7  # at 1, one right step in ten is rejected: results/last_letter_short.md
    config.rl.prompts_per_step, config.rl.samples_per_prompt = 12, 8
    config.rl.generator_steps, config.rl.warmup_steps = 42, 20
    # Step rewards weigh as much as the outcomes leave open: alpha is 0.5 times the share of groups of one outcome.
    config.rl.alpha_initial, config.rl.alpha_schedule = 0.5, "signal"
    config.eval.every, config.eval.problems, config.eval.pool = 6, 96, 48
    return config
