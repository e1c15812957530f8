"""A model with windows compiled for GPUs and TPUs that are not here, where their compilers are installed, as a plan
compiles it.

Two layers of the shape of Gemma 3, one with a window, and heads of 256 numbers: update, prefill and decode step of a
run, with the attention that auto takes. cuDNN takes such heads on an H100, not on an A100.
"""
import json
import re

import pytest

from support.paths import CONFIGS
from tango_jax.cli.command_line import load_config
from tango_jax.config import ROLES
from tango_jax.planning.job import make_job
from tango_jax.planning.programs import lowered_functions
from tango_jax.planning.targets import TARGETS, missing_compilers, open_devices
from tango_jax.weights.presets import CONFIG_JSON

WINDOW = 128
SIZES = ("max_prompt=512", "max_response=255", "row_buckets=(4,)", "cache_buckets=()", "rows_per_micro_batch=2",
         "prompts_per_micro_batch=1", "mesh.fsdp=1", "model.compute_dtype=bfloat16", "model.decode_attention=auto")
KERNEL = re.compile(r'"__cudnn\$(fmha\w+)"|/(splash_mha_\w+?)(?:_no)?_residuals/pallas_call')
# Of prompts, then of rows that continue them: forward and backward.
PROMPT = {"cudnn": ({"fmhaSoftmax"}, {"fmhaSoftmaxBackward"}),
          "splash": ({"splash_mha_fwd"}, {"splash_mha_dq", "splash_mha_dkv"}), "xla": (set(), set())}
ROWS = {"cudnn": {"fmhaScaleBiasSoftmax", "fmhaScaleBiasSoftmaxBackward"},
        "splash": {"splash_mha_fwd_segmented", "splash_mha_dq_segmented", "splash_mha_dkv_segmented"}, "xla": set()}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Both roles on such a checkpoint."""
    folder = tmp_path_factory.mktemp("gemma3")
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512}
    (folder / "config.json").write_text(json.dumps(CONFIG_JSON["google/gemma-3-1b-it"] | layers | sizes))
    overrides = [f"{role}.{item}" for role in ROLES for item in (*SIZES, f"checkpoint={folder}")]
    return load_config(str(CONFIGS / "tiny.py"), ["rl.prompts_per_step=4", *overrides])


@pytest.mark.compilers
@pytest.mark.parametrize("name, count, attention", [
    pytest.param("a100-80gb", 1, "xla", marks=pytest.mark.release), ("h100", 1, "cudnn"), ("tpu-v5p", 4, "splash"),
])
def test_what_auto_takes_for_windows_compiles(config, name, count, attention):
    if missing := missing_compilers(TARGETS[name]):
        pytest.skip(f"needs {' and '.join(missing)}")
    devices = open_devices(TARGETS[name], count)
    job = make_job(config, devices._replace(devices=devices.devices[:1]), 1)
    model = job.functions["generator"].model_config
    assert (model.windows, model.head_dim) == ((WINDOW, 0), 256)
    assert (model.attention, model.decode_attention) == (attention, "xla")  # no kernel of decode steps knows windows
    lowered = lowered_functions(job, "generator")
    programs = {phase: lowered[phase]().compile(devices.compiler_options or None).as_text()
                for phase in ("update", "prefill", "decode")}
    kernels = {phase: {cudnn or splash for cudnn, splash in KERNEL.findall(text)} for phase, text in programs.items()}
    forward, backward = PROMPT[attention]
    assert kernels == {"update": forward | backward | ROWS[attention], "prefill": forward, "decode": set()}
    if attention == "cudnn":
        windows = re.findall(r'sliding_window_length": ?(\d+)', programs["prefill"])
        assert sorted(map(int, windows)) == [0, WINDOW]
