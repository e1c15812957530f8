"""Llama-3.1-8B-Instruct in both roles (arXiv 2505.15034, appendix E); all else as in qwen2_5_math_7b.py.

Command:   the same two, with the file's argument if any:
               python -m tango_jax.sft --config=configs/llama3_1_8b.py --config.generator.init_from= \
                   --config.task.stage_one=TAGGED.parquet --workdir=runs/llama3_1_8b_sft
               python -m tango_jax.train --config=configs/llama3_1_8b.py --workdir=runs/llama3_1_8b
           The model is gated: accept its licence on the hub and log in (hf auth login), or give a folder that holds it
           as --config.generator.checkpoint=FOLDER --config.verifier.checkpoint=FOLDER.
Hardware:  the paper's is 4 nodes of 8 A100; mesh and processes are those of qwen2_5_math_7b.py. The plan
               python -m tango_jax.plan --config=configs/llama3_1_8b.py --target=a100-80gb:32
           says that a device needs 64 of 75 GiB. A checkpoint of both roles is 193 GB.
Time:      predicted by the same plan, not timed: 47 hours on 32 A100, if responses are half as long as they may be on
           average.
Expected:  not reproduced here; the paper's figures are in its appendix E. Compare with --config.arm=grpo, the generator
           alone.
"""

from ml_collections import ConfigDict

from tango_jax.cli.config_file import load_shipped


def get_config(argument: str = "") -> ConfigDict:
    config = load_shipped("qwen2_5_math_7b", argument)
    for role in (config.generator, config.verifier):
        role.checkpoint = "meta-llama/Llama-3.1-8B-Instruct"
    config.generator.init_from = "runs/llama3_1_8b_sft"
    # Eight key/value heads and 32 layers: a cached token takes 2.3 times the memory of Qwen2.5-7B's.
    config.generator.row_buckets, config.verifier.row_buckets = (40, 80, 160), (40, 80)
    return config
