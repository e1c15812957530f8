"""The steps of a device check, each a process: `python -m tango_jax.planning.device_steps STEP SIZE`.

Prints one JSON object a line on standard output; tracebacks go to standard error.
"""

import contextlib
import importlib.metadata
import json
import os
import statistics
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from tango_jax.cli.command_line import load_config
from tango_jax.cli.session import configure, configured
from tango_jax.cli.validation import validate
from tango_jax.config import ROLES, default_config
from tango_jax.loop.run import run_or_resume
from tango_jax.models.attention import capability_of
from tango_jax.models.transformer import ModelConfig
from tango_jax.planning.device_parity import ParitySizes, comparisons, error_text
from tango_jax.planning.device_sizes import TimedSizes, timed
from tango_jax.planning.machines import GIB
from tango_jax.planning.targets import target_name
from tango_jax.runtime import hosts
from tango_jax.runtime.atomic import json_value
from tango_jax.runtime.console import Console
from tango_jax.runtime.machine import device_memory
from tango_jax.runtime.process import process_facts
from tango_jax.runtime.termination import end_with_parent
from tango_jax.tracking.metrics import read_metrics

Emit = Callable[[dict], None]

SMOLLM2 = "TANGO_SMOLLM2"  # names a .gguf file of SmolLM2-135M-Instruct
POLL_S = 2.0

# Prefixes of packages that bring an accelerator's libraries.
LIBRARIES = ("jax-cuda", "jax-rocm", "libtpu", "nvidia-cudnn", "nvidia-nccl", "nvidia-cublas", "nvidia-cuda-runtime")
SETTINGS = ("JAX_PLATFORMS", "JAX_OPTIMIZATION_LEVEL", "XLA_FLAGS", "XLA_PYTHON_CLIENT_MEM_FRACTION",
            "LIBTPU_INIT_ARGS")


class CheckSize(NamedTuple):
    parity: ParitySizes
    timed: TimedSizes
    config: str  # a shipped one
    settings: dict[str, Any]  # that shorten it


def _small_model(**sizes: int) -> ModelConfig:
    return ModelConfig(num_heads=4, num_kv_heads=2, remat="none", attention="xla", **sizes)


SIZES = {
    # Heads of 128 numbers, which every kernel takes; lengths are multiples of the pages. A gate of stage 1 would end a
    # shortened run.
    "full": CheckSize(
        ParitySizes(_small_model(vocab_size=4096, width=512, num_layers=2, head_dim=128, mlp_width=1024), prompts=4,
                    samples=4, prompt=64, new=64, row=300, rank=32),
        TimedSizes("Qwen/Qwen2.5-7B", layers=8, rows=(64, 256), prompt=512, new=512, trained=16, rank=32),
        "last_letter_mini",
        {"generator.sft.steps": 60, "verifier.sft.steps": 60, "generator.sft.max_heldout_loss": 0.0,
         "verifier.sft.max_heldout_loss": 0.0, "rl.generator_steps": 12, "rl.warmup_steps": 3, "eval.every": 12}),
    "tiny": CheckSize(
        ParitySizes(_small_model(vocab_size=128, width=32, num_layers=1, head_dim=8, mlp_width=64), prompts=2,
                    samples=2, prompt=16, new=8, row=40, rank=4),
        TimedSizes("HuggingFaceTB/SmolLM2-135M", layers=1, rows=(2, 4), prompt=16, new=8, trained=4, rank=4, vocab=64),
        "tiny",
        {"generator.sft.steps": 2, "verifier.sft.steps": 2, "rl.generator_steps": 1, "rl.warmup_steps": 1,
         "eval.every": 1, "eval.problems": 2, "eval.pool": 2, "generator.row_buckets": (8,),
         "verifier.row_buckets": (8,), "generator.cache_buckets": ()}),
}


def devices(size: CheckSize, emit: Emit) -> None:
    """Facts, one a row, without host names."""
    facts, device = process_facts(), jax.local_devices()[0]
    for name in ("hosts", "command", "time", "processes"):
        del facts[name]
    packages = {(item.name.lower(), item.version) for item in importlib.metadata.distributions() if item.name}
    facts |= {
        "device memory, GiB": round(device_memory() / GIB, 1),
        "compute capability": capability_of(device),
        "runtime": " ".join(device.client.platform_version.split()),
        **{name: version for name, version in sorted(packages) if name.startswith(LIBRARIES)},
        **{name: os.environ[name] for name in SETTINGS if name in os.environ},
        "target of a plan": target_name(device.device_kind),
    }
    for name, value in facts.items():
        if value not in (None, "", {}):
            emit({"what": name, "which": str(value)})


def parity(size: CheckSize, emit: Emit) -> None:
    for found in comparisons(size.parity):
        emit(found)


def sizes(size: CheckSize, emit: Emit) -> None:
    for found in timed(size.timed):
        emit(found)


def quickstart(size: CheckSize, emit: Emit) -> None:
    """Median seconds of a turn by phase, of a run in a temporary folder."""
    config, console = load_config(size.config, size.settings), Console(enabled=False)
    validate(config)
    with tempfile.TemporaryDirectory() as folder, configured(config, console):
        workdir = Path(folder) / "run"
        summary = run_or_resume(config, workdir, console, preemption=hosts.Preemption(is_watching=False))
        turns = [line for line in read_metrics(workdir / "metrics.jsonl") if line["phase"] == "generator"]
    for name in [name for name in turns[-1] if name.startswith("time/")]:
        seconds = statistics.median(turn.get(name, 0.0) for turn in turns)
        emit({"generator's turn": name.removeprefix("time/").removesuffix("_s"), "seconds": seconds})
    emit({"generator's turn": "largest gap between log-probs of sampler and trainer, nats",
          "gap": summary["logprob_gap_max"]})


def smollm2(size: CheckSize, emit: Emit) -> None:
    """`grpo` on last_letter, a row for each turn: the step is cut off when the minutes are over."""
    file = os.environ.get(SMOLLM2, "")
    if not file:
        emit({"left_out": f"{SMOLLM2} names no .gguf file of SmolLM2-135M-Instruct"})
        return
    names = {f"{role}.checkpoint": file for role in ROLES}
    config = load_config("smollm2_last_letter", names | {"arm": "grpo", "verifier.sft.steps": 0})
    console, is_over = Console(enabled=False), threading.Event()
    validate(config)
    with tempfile.TemporaryDirectory() as folder, configured(config, console):
        workdir = Path(folder) / "run"
        watcher = threading.Thread(target=_emit_turns, args=(workdir / "metrics.jsonl", is_over, emit), daemon=True)
        watcher.start()
        try:
            run_or_resume(config, workdir, console, preemption=hosts.Preemption(is_watching=False))
        finally:
            is_over.set()
            watcher.join()


def _emit_turns(path: Path, is_over: threading.Event, emit: Emit) -> None:
    told, is_last = 0, False
    while not is_last:
        is_last = is_over.wait(POLL_S)
        lines = [line for line in read_metrics(path) if line["phase"] == "generator"] if path.exists() else []
        for line in lines[told:]:
            told += 1
            emit({"turn": told, "seconds": line["time/turn_s"], "outcome reward": line.get("generator/reward/outcome"),
                  "gap": line.get("generator/logprob_gap_max")})


STEPS = {step.__name__: step for step in (devices, parity, sizes, quickstart, smollm2)}


def main(step: str, size: str) -> int:
    # Only rows go to standard output, whatever libraries print.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    end_with_parent()

    def emit(found: dict) -> None:
        out.write(json.dumps(json_value(found)) + "\n")
        out.flush()

    try:
        with contextlib.redirect_stdout(sys.stderr):
            if warning := configure(default_config()):
                print(warning)
            STEPS[step](SIZES[size], emit)
    # The parent reads why the step ended in one line.
    except Exception as error:
        traceback.print_exc()
        emit({"failed": error_text(error)})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
