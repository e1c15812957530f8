"""Llama-3.1-8B-Instruct in both roles (arXiv 2505.15034, appendix E); otherwise as in qwen2_5_math_7b.py.

Command:   as in qwen2_5_math_7b.py, with the same optional argument after the file name:
               python -m tango_jax.sft --config=configs/llama3_1_8b.py --config.generator.init_from= \
                   --config.task.stage_one=TAGGED.parquet --workdir=runs/llama3_1_8b_sft
               python -m tango_jax.train --config=configs/llama3_1_8b.py --workdir=runs/llama3_1_8b
           The model is gated. Accept its licence on the hub and log in (hf auth login), or pass a local folder with
           --config.generator.checkpoint=FOLDER --config.verifier.checkpoint=FOLDER.
Hardware:  the paper used 4 nodes of 8 A100. Mesh and processes are as in qwen2_5_math_7b.py. This prints the memory of
           a device:
               python -m tango_jax.plan --config=configs/llama3_1_8b.py --target=a100-80gb:32
           A checkpoint of both roles is 193 GB.
Time:      predicted, not measured, if the mean response has 0.3 of the maximum length: 11 to 18 hours on 32 A100, or 8
           to 13 if both roles sample in int8 (`model.sample_cache_dtype`, `model.sample_weight_dtype`).
Expected:  not reproduced. The paper's results are in its appendix E. The baseline is --config.arm=grpo, which trains
           the generator alone.
"""

from ml_collections import ConfigDict

from tango_jax.cli.config_file import load_shipped


def get_config(argument: str = "") -> ConfigDict:
    config = load_shipped("qwen2_5_math_7b", argument)
    for role in (config.generator, config.verifier):
        role.checkpoint = "meta-llama/Llama-3.1-8B-Instruct"
    config.generator.init_from = "runs/llama3_1_8b_sft"
    # Eight key/value heads and 32 layers: a cached token takes 2.3 times the memory of one of Qwen2.5-7B. Four devices
    # have room for 96 of the verifier's rows at their longest (26 GB on each); where more get long, some wait in host
    # memory.
    config.verifier.cache_tokens = 96 * (4096 + 4096)
    return config
