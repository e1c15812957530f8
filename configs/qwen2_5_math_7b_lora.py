"""Two 7B roles on one GPU of 80 GB: adapters of both roles on one frozen Qwen2.5-Math-7B.

Command:   First run stage 1 of the generator, as in configs/qwen2_5_math_7b.py. Here it trains the adapter:
               python -m tango_jax.sft --config=configs/qwen2_5_math_7b_lora.py --config.generator.init_from= \\
                   --config.task.stage_one=TAGGED.parquet --workdir=runs/qwen2_5_math_7b_lora_sft
           Then run reinforcement learning, which starts from its result:
               python -m tango_jax.train --config=configs/qwen2_5_math_7b_lora.py --workdir=runs/qwen2_5_math_7b_lora
Hardware:  one H100 or A100 of 80 GB. This prints memory and times:
               python -m tango_jax.plan --config=configs/qwen2_5_math_7b_lora.py --target=h100:1
           A checkpoint of both roles is 1 GB.
Time:      predicted, not measured: see tango_jax/planning/README.md.
Expected:  not run on a GPU or TPU so far.
"""

from ml_collections import ConfigDict

from tango_jax.cli.config_file import load_shipped

RANK = 32


def get_config() -> ConfigDict:
    config = load_shipped("qwen2_5_math_7b")
    config.rl.prompts_per_step, config.rl.samples_per_prompt = 64, 8
    for role in (config.generator, config.verifier):
        role.checkpoint = "Qwen/Qwen2.5-Math-7B"
        role.model.lora.rank = RANK
        role.model.remat = "full"
        role.optimizer.lora_lr = 1e-5  # ten times that of all parameters
        role.mesh.data, role.mesh.fsdp, role.mesh.tensor, role.mesh.decode_tensor = 1, -1, 1, 1
        role.row_buckets = (8, 16, 32, 48, 64, 96, 128)
        role.cache_tokens = 64 * 4096  # 15 GB of keys and values, 64 rows at their longest
        role.loss.kl_coef = 0.001  # against the base with the adapter that stage 1 left, which costs that adapter
    config.generator.pack_length, config.generator.rows_per_micro_batch = 4096, 2
    config.verifier.pack_length, config.verifier.rows_per_micro_batch = 8192, 1
    config.generator.init_from = "runs/qwen2_5_math_7b_lora_sft"
    # Question and solution, then the verification: all 4096 positions of the model.
    config.verifier.max_prompt, config.verifier.max_response = 2560, 1536
    config.verifier.prompt_buckets, config.verifier.cache_buckets = (1024, 1536), (512, 1024)
    return config
