"""Your problems and your model. All other settings follow from them and from the machine.

Command:   python -m tango_jax.train --config=own_problems --model=MODEL --problems=FILE
           MODEL is a Hugging Face folder, a hub id, a .gguf file or a workdir. Both roles start from it. For another
           verifier set --config.verifier.checkpoint=OTHER. FILE has rows such as {"question": "3 + 4?", "answer": "7"}
           in JSONL, JSON or parquet, or is a hub id. A tenth of FILE is held out for evaluation, unless
           --config.task.test=FILE names other problems. To plan a run on another machine:
           python -m tango_jax.plan --config=own_problems --model=MODEL --problems=FILE --target=tpu-v5e:1
Hardware:  any. Batches are as large as memory and the number of problems allow. The two policies with optimizer states,
           references and the gradients of an update take 40 bytes per parameter of MODEL: 5.4 GB for 135 M parameters,
           60 GB for 1.5 B.
Expected:  the run first prints what it chose and why. A model that does not follow the prompt's instruction to answer
           in tagged steps learns it in stage 1, from its own samples that are right (task.stage_one=self): the run
           first looks at up to 32 of them. Set any key with --config.key=value. The settings that depend on it are
           chosen again. Where solutions differ in their number of steps, set
           --config.generator.loss.step_norm=solutions: the published form made solutions of a task of words
           a fifth shorter (configs/results/step_forms.md).
"""

from collections.abc import Collection
from typing import Annotated

from ml_collections import ConfigDict

from tango_jax.config import default_config
from tango_jax.method.arms import ARMS
from tango_jax.planning.own_problems import fit


def get_config(
    *,
    model: Annotated[str, "a Hugging Face folder, a hub id, a .gguf file or a run's workdir (to try it without a "
                          "model: runs/tiny, after python -m tango_jax.train --config=tiny)"],
    problems: Annotated[str, "a file of rows such as {\"question\": \"3 + 4?\", \"answer\": \"7\"}, in JSONL, JSON or "
                             "parquet, or a hub id"],
) -> ConfigDict:
    config = default_config()
    config.task.name, config.task.train = "math", problems
    for role in (config.generator, config.verifier):
        role.checkpoint, role.template = model, "math"
        # In a turn of few problems all groups may lack a signal. Adam then follows the bonus alone, at full size.
        role.loss.entropy_coef = 0.0
    config.checkpoint.keep = 1
    config.ablation.arms = tuple(name for name in config.ablation.arms if not ARMS[name].needs_gold_steps)
    return config


def complete(config: ConfigDict, given: Collection[str]) -> None:
    """Set what follows from the problems, the models and the machine, but for the keys in `given`."""
    fit(config, given)
