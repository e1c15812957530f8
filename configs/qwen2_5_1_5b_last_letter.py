"""Qwen2.5-1.5B in both roles on last-letter concatenation, at the sizes of arXiv 2505.15034, section 4.3.

Stage 1 uses 2 to 4 words of 3 to 6 letters, reinforcement learning 2 to 10 words of 3 to 10 letters, and the test 2 to
12 words of 3 to 12 letters. Batches have 64 prompts. Settings that the section does not give (learning rates, steps,
schedule) are as in qwen2_5_math_7b.py. Two choices are not from the paper. The teacher of stage 1 makes mistakes on
purpose (tasks/last_letter.py). The verifier also has a stage 1, because the task's prompt does not describe the format.

Command:   python -m tango_jax.train --config=configs/qwen2_5_1_5b_last_letter.py --workdir=runs/last_letter_1_5b
Hardware:  one GPU with 141 GB, by calculation. Weights, moments and reference of both roles take 49 GB in float32. The
           gradient and new weights of one role take up to 12 GB. Decode weights and the verifier's KV cache take up to
           28 GB (while the cache grows, two copies exist). A checkpoint takes 40 GB of disk.
Time:      predicted, not measured: 0.9 to 1.5 hours on one H200 (tango_jax/planning/README.md).
Expected:  not reproduced. The paper's results are in its section 4.3. The test has more and longer words than
           training. The baseline is --config.arm=grpo, which trains the generator alone.
"""

from ml_collections import ConfigDict

from tango_jax.config import default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.task.name = "last_letter"
    config.task.sft_words, config.task.sft_letters = (2, 4), (3, 6)
    config.task.rl_words, config.task.rl_letters = (2, 10), (3, 10)
    config.task.test_words, config.task.test_letters = (2, 12), (3, 12)
    for role in (config.generator, config.verifier):
        role.checkpoint = "Qwen/Qwen2.5-1.5B"
        role.template = "last_letter"
        role.model.compute_dtype, role.model.head_precision = "bfloat16", "bfloat16_x3"
        role.logp_chunk = 512
        role.row_buckets = (80, 160, 320)  # a batch of 320 rows at once, which shrinks
        role.pack_length, role.rows_per_micro_batch, role.prompts_per_micro_batch = 2048, 4, 0
        role.optimizer.lr = 1e-6
        role.sft.steps, role.sft.batch_size, role.sft.pack_length = 800, 64, 2048
        role.sft.optimizer.lr, role.sft.optimizer.schedule = 5e-6, "cosine"
        role.sft.optimizer.warmup_steps = 80
    # A token is at least one byte. 12 words of 12 letters are 183 bytes, their solution 355, its verification 688.
    config.generator.max_prompt, config.generator.max_response = 256, 384
    config.generator.cache_buckets = (192,)
    config.verifier.max_prompt, config.verifier.max_response = 704, 768
    config.verifier.prompt_buckets, config.verifier.cache_buckets = (384,), ()
    config.rl.prompts_per_step, config.rl.samples_per_prompt = 64, 5
    config.rl.warmup_steps, config.rl.generator_steps = 40, 300
    config.checkpoint.every = 50
    return config
