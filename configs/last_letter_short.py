"""Last-letter concatenation on 2 to 6 words, where the outcome says nearly all and a verifier buys nothing.

Command:   python -m tango_jax.train --config=configs/last_letter_short.py --workdir=runs/last_letter_short
Hardware:  any CPU with two cores and 4 GiB of memory; nothing is downloaded.
Time:      9 minutes on two cores.
Expected:  seed 0: generator accuracy 0.20 to 0.93, verifier step macro-F1 0.49 to 1.00, outcome macro-F1 0.45 to 1.00.
           All runs: last_letter_short_results.md.
"""

from ml_collections import ConfigDict

from tango_jax.config import default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.task.data_seed = 3  # settings were tuned on 0, 1 and 2, so their held-out problems are not reported
    for role in (config.generator, config.verifier):
        role.template = "last_letter"
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
    # At most 8 words of 10 letters: the question has up to 97 tokens, the solution 55, the verification 96.
    config.generator.max_prompt, config.generator.max_response = 97, 64
    config.generator.rows_per_micro_batch, config.generator.prompts_per_micro_batch = 8, 4
    config.generator.sft.pack_length, config.generator.sft.rows_per_micro_batch = 160, 8
    # 100 rows in its own turns, 20 in the verifier's. Steps of ended rows are then a tenth of all.
    config.generator.row_buckets = (5, 10, 20, 40, 70, 100)
    config.generator.sft.steps = 800
    config.verifier.max_prompt, config.verifier.max_response = 155, 104
    config.verifier.prompt_buckets, config.verifier.row_buckets = (120,), (25, 50, 75, 100)
    config.verifier.rows_per_micro_batch, config.verifier.prompts_per_micro_batch = 6, 2
    config.verifier.sft.pack_length, config.verifier.sft.rows_per_micro_batch = 256, 4
    config.verifier.sft.steps = 600
    config.verifier.sft.start = "generator"  # both roles share one base, like two checkpoints of a model family
    config.generator.optimizer.lr = config.verifier.optimizer.lr = 1e-4
    # At temperature 1 the verifier rejects one correct step in ten. Once nearly all solutions are correct, most
    # rejected steps belong to correct solutions, and a verdict that ignores the steps earns more reward: see
    # last_letter_short_results.md.
    config.verifier.temperature = 0.7
    config.rl.prompts_per_step = 20
    config.rl.samples_per_prompt = 5
    config.rl.generator_steps = 60
    config.eval.every = 6
    config.rl.warmup_steps = 10
    config.rl.alpha_initial = 0.5
    return config
