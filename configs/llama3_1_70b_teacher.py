"""Stage 0 of the published setting: Llama-3.1-70B-Instruct solves problems in tagged steps, for stage 1 to imitate.

Command:   python -m tango_jax.generate --config=configs/llama3_1_70b_teacher.py --workdir=runs/teacher
           Then pass --config.task.stage_one=runs/teacher to a run of stage 1. For another teacher set
           --config.generator.checkpoint=MODEL --config.verifier.checkpoint=MODEL. For other problems set
           --config.task.train=FILE.
Hardware:  one node of 8 GPUs with 80 GB. The 141 GB of weights in bfloat16 are held twice: as loaded and as laid out
           for sampling. Each copy is split over the eight GPUs: 36 GB per GPU. The KV cache of a full-length row is 1.3
           GB, split in the same way. A CPU host with 384 GB of memory and mesh.decode_tensor=1 also works. Smaller
           teachers fit smaller devices.
Time:      an estimate, not measured: 113,000 solutions of about 500 tokens each are 56 million tokens. On an
           accelerator with 3 TB/s of memory bandwidth and 64 rows at a time, reading the weights limits the speed to
           1,300 tokens/s: half a day. On a CPU host with 4 TFLOP/s, compute limits it to 30 tokens/s: three weeks.
           Finished shards are never lost.
Expected:  not run at this size. Nearly every solution should be tagged, because the prompt shows the layout.
           counts.json counts the truncated and the untagged ones. Wrong answers are kept, and marked in the column
           is_correct of train.parquet.
"""

from ml_collections import ConfigDict

from tango_jax.config import default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.task.name, config.task.train = "math", "eurus_train"
    config.task.min_steps = 3
    # One solution per prompt at T=0.1 and top_p=0.5, for as many prompts as in the published stage 1.
    config.generate.samples, config.generate.temperature, config.generator.top_p = 1, 0.1, 0.5
    config.generate.problems = 113_000
    # The verifier and stage 2 are not used; their settings only need to be valid.
    for role in (config.generator, config.verifier):
        role.checkpoint, role.use_chat = "meta-llama/Llama-3.1-70B-Instruct", True
        role.template = "math"
        role.max_prompt, role.max_response = 2048, 2048
        role.model.param_dtype = role.model.compute_dtype = role.model.head_precision = "bfloat16"
        role.model.remat = "none"
        role.mesh.decode_tensor = 8
        role.prompt_buckets, role.cache_buckets, role.row_buckets = (256, 512, 1024), (512, 1024), (8, 16, 32, 64)
        role.cache_tokens = 64 * (2048 + 2048)  # of eight devices: room for all rows at their longest
    config.rl.prompts_per_step, config.rl.samples_per_prompt = 1, 2
    config.task.validation = 1
    return config
