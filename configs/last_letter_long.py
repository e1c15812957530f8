"""Last-letter concatenation on long problems, where a right answer is rare and the verifier's judgements matter.

Command:   python -m tango_jax.train --config=configs/last_letter_long.py --workdir=runs/last_letter_long
Hardware:  any CPU with two cores and 4 GiB of memory; nothing is downloaded.
Expected:  greedy accuracy from 0.01 to between 0.4 and 1.0 within 60 generator steps, depending on the start: half an
           hour on one core for stage 1, five minutes for the rest. configs/when_it_pays.md has the runs of all arms.
"""

from ml_collections import ConfigDict

from tango_jax.config import default_config

WORDS, LETTERS = 16, 5  # of the longest problem of stage 1
RL_WORDS = 12  # of every problem of the generator's turns and of the test; chosen as configs/when_it_pays.md says


def get_config() -> ConfigDict:
    config = default_config()
    task = config.task
    task.sft_words, task.rl_words, task.test_words = (2, WORDS), (RL_WORDS, RL_WORDS), ()
    task.sft_letters = task.rl_letters = task.test_letters = (3, LETTERS)
    # Outcomes on short problems are nearly balanced; of the long ones, the generator gets one in 100 right at first.
    task.verifier_words = (2, 4)
    task.hard_error, task.reading_error = 0.8, 0.4
    for role in (config.generator, config.verifier):
        role.template = "last_letter"
        role.model.mlp_width = 256
        # As in Qwen3. Without it, attention heads that must find a single letter train slowly and amplify rounding.
        role.model.qk_norm = True
        role.model.remat = "none"
        role.model.unroll = True
        role.row_buckets = (24, 48, 96)
        role.sft.batch_size = 32
        role.sft.eval_examples = 64
        role.sft.optimizer.lr = 2e-3
        role.sft.optimizer.schedule = "cosine"
        role.sft.optimizer.warmup_steps = 50
        role.sft.optimizer.b2 = 0.98
        role.sft.max_heldout_loss = 0.1
    # BOS, the question and its line break; a solution; its verification. With EOS.
    question, solution, verification = 1 + WORDS * (LETTERS + 2), 6 * WORDS + 7, 11 * WORDS + 8
    config.generator.max_prompt, config.generator.max_response = question, solution + 5
    config.generator.cache_buckets = (56,)
    config.generator.rows_per_micro_batch, config.generator.prompts_per_micro_batch = 8, 4
    config.generator.sft.pack_length, config.generator.sft.rows_per_micro_batch = question + solution, 8
    config.generator.sft.steps = 800
    config.verifier.max_prompt, config.verifier.max_response = question + solution + 8, verification + 8
    config.verifier.prompt_buckets, config.verifier.cache_buckets = (72,), (56, 112)
    config.verifier.rows_per_micro_batch, config.verifier.prompts_per_micro_batch = 6, 2
    config.verifier.sft.pack_length = question + solution + verification + 3
    config.verifier.sft.rows_per_micro_batch = 4
    config.verifier.sft.steps = 1300
    config.verifier.sft.start = "generator"  # both roles share one base, like two checkpoints of a model family
    config.generator.optimizer.lr = config.verifier.optimizer.lr = 1e-4
    config.verifier.temperature = 0.7
    config.rl.prompts_per_step, config.rl.samples_per_prompt = 12, 8
    config.rl.generator_steps = 60
    config.rl.warmup_steps = 12
    config.rl.alpha_initial, config.rl.alpha_schedule = 0.5, "signal"
    config.eval.every = 6
    config.eval.problems, config.eval.pool = 96, 48
    config.rollouts.every = 10
    config.checkpoint.every = 20
    return config
