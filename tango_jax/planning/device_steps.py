"""The steps of `bench --check`, each in a process of its own: whatever one does to the device, the next begins anew.

    python -m tango_jax.planning.device_steps STEP SIZE ...

is how device_check.py starts one. In: the names of the step and of its sizes. Out: on standard output one JSON object a
line, as soon as it is known, and nothing else; an error's traceback goes to standard error. Steps:

    devices                   what is here, by name and version
    parity                    device_parity.py
    quickstart                a short run of the quickstart's models, its seconds by phase
    model NAME RANK RUNS      the phases of `bench --model`, of all parameters (rank 0) or of adapters
"""

import contextlib
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from tango_jax.cli.command_line import load_config
from tango_jax.cli.session import configure, configured
from tango_jax.cli.validation import validate
from tango_jax.config import ROLES, default_config
from tango_jax.loop.run import run_or_resume
from tango_jax.models.attention import capability_of
from tango_jax.models.transformer import ModelConfig
from tango_jax.planning.bench_phases import (
    TRAINING_PHASES,
    DeviceRates,
    bench_phases,
    describe_model,
    measured_rates,
)
from tango_jax.planning.bench_predicted import target_here
from tango_jax.planning.bench_sizes import BenchOptions, bench_machine, open_bench, open_model
from tango_jax.planning.device_parity import ParitySizes, comparisons, error_text
from tango_jax.planning.estimates import as_programs, estimates_of
from tango_jax.planning.job import sized_job
from tango_jax.planning.machines import GIB
from tango_jax.planning.sources import plan_source
from tango_jax.planning.targets import known_target
from tango_jax.planning.times import turn_times
from tango_jax.runtime import hosts
from tango_jax.runtime.atomic import json_value
from tango_jax.runtime.checks import cut
from tango_jax.runtime.console import Console, Stage
from tango_jax.runtime.machine import device_memory
from tango_jax.runtime.process import process_facts
from tango_jax.runtime.termination import end_with_parent
from tango_jax.tracking.metrics import read_metrics

Emit = Callable[[dict], None]

# Packages that bring an accelerator's libraries, by how their names begin.
LIBRARIES = ("jax-cuda", "jax-rocm", "libtpu", "nvidia-cudnn", "nvidia-nccl", "nvidia-cublas", "nvidia-cuda-runtime")
SETTINGS = ("JAX_PLATFORMS", "JAX_OPTIMIZATION_LEVEL", "XLA_FLAGS", "XLA_PYTHON_CLIENT_MEM_FRACTION",
            "LIBTPU_INIT_ARGS")  # fmt: skip
SMI_TIMEOUT_S = 20
SMI_FIELDS = ("name", "driver_version", "memory.total", "clocks.max.sm", "power.limit")


class TimedModel(NamedTuple):
    """A model whose phases are timed."""

    name: str  # a preset
    layers: int = 0  # 0: all
    vocab: int = 0  # tokens that it knows; 0: all
    rows: tuple[int, int] = (64, 256)  # decoded at once
    prompt: int = 0  # tokens; 0: as many as `bench --model` chooses
    new: int = 0
    micro_rows: int = 0  # responses in a micro-batch of an update
    dtype: str = "bfloat16"


class CheckSize(NamedTuple):
    """How much is done."""

    parity: ParitySizes
    config: str  # a shipped one
    settings: dict[str, Any]  # that shorten it
    models: tuple[TimedModel, ...]
    matrix: int = 0  # size of the matrices by which rates are measured; 0: one that keeps the device busy


def _small_model(**sizes: int) -> ModelConfig:
    return ModelConfig(num_heads=4, num_kv_heads=2, remat="none", attention="xla", **sizes)


# A gate of stage 1 would end a run that is cut short.
_SHORT = {"generator.sft.steps": 60, "verifier.sft.steps": 60, "generator.sft.max_heldout_loss": 0.0,
          "verifier.sft.max_heldout_loss": 0.0, "rl.generator_steps": 12, "rl.warmup_steps": 3,
          "eval.every": 12}  # fmt: skip
# Heads of 128 numbers, which every kernel takes; lengths are multiples of what their pages need.
_PARITY = ParitySizes(_small_model(vocab_size=4096, width=512, num_layers=2, head_dim=128, mlp_width=1024), prompts=4,
                      samples=4, prompt=64, new=64, row=300, rank=32)  # fmt: skip
SIZES = {
    "device": CheckSize(_PARITY, "last_letter_mini", _SHORT, (
        TimedModel("qwen2_5_0_5b"), TimedModel("qwen2_5_1_5b"), TimedModel("qwen2_5_7b", layers=7))),
    "cpu": CheckSize(_PARITY._replace(row=150, prompt=32, new=32), "last_letter_mini", _SHORT, (
        TimedModel("smollm2_135m_instruct", layers=4, rows=(8, 32), prompt=64, new=32, dtype="float32"),)),
    "tiny": CheckSize(
        ParitySizes(_small_model(vocab_size=128, width=32, num_layers=1, head_dim=8, mlp_width=64), prompts=2,
                    samples=2, prompt=16, new=8, row=40, rank=4),
        "tiny", {"generator.sft.steps": 2, "verifier.sft.steps": 2, "rl.generator_steps": 1, "rl.warmup_steps": 1,
                 "eval.every": 1, "eval.problems": 2, "eval.pool": 2, "generator.row_buckets": (8,),
                 "verifier.row_buckets": (8,), "generator.cache_buckets": ()},
        (TimedModel("smollm2_135m_instruct", layers=1, vocab=1024, rows=(2, 4), prompt=8, new=4, micro_rows=2,
                    dtype="float32"),),
        matrix=256),
}  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- devices


def devices(size: str, emit: Emit) -> None:
    """One row of facts. Names of hosts are left out: the table is for others to read."""
    facts = process_facts()
    for name in ("hosts", "command", "time", "processes"):
        del facts[name]
    device = jax.local_devices()[0]
    known = known_target(device.device_kind, jax.device_count())
    emit({"facts": facts | {
        "device_memory_gib": round(device_memory() / GIB, 1),
        "compute_capability": capability_of(device),
        "runtime": " ".join(device.client.platform_version.split()),
        "libraries": {name: version for name, version in installed() if name.startswith(LIBRARIES)},
        "nvidia_smi": nvidia_smi(),
        "settings": {name: os.environ[name] for name in SETTINGS if name in os.environ},
        "plan_target": known and known.name,
    }})  # fmt: skip


def installed() -> list[tuple[str, str]]:
    found = {(item.name.lower(), item.version) for item in importlib.metadata.distributions() if item.name}
    return sorted(found)


def nvidia_smi() -> str | None:
    """What NVIDIA's tool says of the first GPU; None: there is none, or the tool is missing."""
    command = ["nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.splitlines()[0] if done.returncode == 0 and done.stdout.strip() else None


# ------------------------------------------------------------------------------------------------ parity, quickstart


def parity(size: str, emit: Emit) -> None:
    for found in comparisons(SIZES[size].parity):
        emit(found)


class StageClock(Console):
    """A silent console that notes when each stage begins."""

    def __init__(self):
        super().__init__(enabled=False)
        self.began = [("Models, problems and checks", time.monotonic())]

    def stage(self, title: str, total: int, done: int = 0) -> Stage:
        self.began.append((title, time.monotonic()))
        return super().stage(title, total, done)

    def seconds(self) -> list[tuple[str, float]]:
        """Of each stage, up to the beginning of the next or until now."""
        ends = [began for _, began in self.began[1:]] + [time.monotonic()]
        return [(title, end - began) for (title, began), end in zip(self.began, ends, strict=True)]


def quickstart(size: str, emit: Emit) -> None:
    """A run from nothing in a folder that is removed: seconds of its stages, and of a turn by phase."""
    config, console = load_config(SIZES[size].config, SIZES[size].settings), StageClock()
    validate(config)
    with tempfile.TemporaryDirectory() as folder, configured(config, console):
        workdir = Path(folder) / "run"
        summary = run_or_resume(config, workdir, console, preemption=hosts.Preemption(is_watching=False))
        turns = [line for line in read_metrics(workdir / "metrics.jsonl") if line["phase"] == "generator"]
    for title, seconds in console.seconds():
        emit({"phase": title, "seconds": seconds})
    filled = statistics.mean(turn["generator/length_mean"] for turn in turns) / config.generator.max_response
    predicted = predicted_turn(config, filled, SIZES[size].matrix)
    names = [name for name in turns[-1] if name.startswith("time/") and name != "time/turn_s"]
    for name in names:
        phase = name.removeprefix("time/").removesuffix("_s")
        seconds = statistics.median(turn.get(name, 0.0) for turn in turns)
        emit({"phase": f"a generator's turn: {phase}", "seconds": seconds, "predicted_s": predicted.get(phase)})
    emit({"note": f"Largest gap between log-probs of sampler and trainer in the run: "
                  f"{summary['logprob_gap_max']:.1e} nats (float32)."})  # fmt: skip


def predicted_turn(config: ConfigDict, filled: float, matrix: int) -> dict[str, float]:
    """Seconds of the phases of a generator's turn by the plan's arithmetic; {}: this device is no target of it."""
    memory = device_memory()
    models = {role: plan_source(config, role).model_config for role in ROLES}
    target = target_here(memory, *measured_rates(models["generator"], matrix))
    if target is None:
        return {}
    job, programs = sized_job(config, models, bench_machine(memory)), {}
    for role in ROLES:
        programs |= as_programs(role, estimates_of(job, role, target.platform), {})
    return turn_times(job, programs, target, "generator", filled).seconds


# ------------------------------------------------------------------------------------------------------------ models


def model(size: str, emit: Emit, name: str, rank: str, runs: str) -> None:
    """Decoding few rows, prompts and decoding many rows, training: what does not fit is a row that says so, and the
    others follow."""
    [timed] = [each for each in SIZES[size].models if each.name == name]
    options = BenchOptions(timed.name, dtype=timed.dtype, layers=timed.layers, vocab=timed.vocab, prompt=timed.prompt,
                           new=timed.new, micro_rows=timed.micro_rows, lora_rank=int(rank))  # fmt: skip
    rates, (few, many) = measured_rates(open_model(options), SIZES[size].matrix), timed.rows
    emit({"machine": rates._asdict()})
    for rows, phases in ((few, ("decode",)), (many, ("prefill", "decode")), (few, TRAINING_PHASES)):
        _time_group(options._replace(rows=rows), phases, int(runs), rates, emit)


def _time_group(options: BenchOptions, phases: tuple[str, ...], runs: int, rates: DeviceRates, emit: Emit) -> None:
    left, what = list(phases), {"model": options.model, "rank": options.lora_rank, "layers": options.layers}

    def report(phase: str, found: dict) -> None:
        if phase != "machine":
            left.remove(phase)
            emit(what | sizes_of(phase) | {"phase": phase} | found)

    def sizes_of(phase: str) -> dict:
        if phase in TRAINING_PHASES:
            return {"rows": sizes.micro_rows, "layers": policy.model_config.num_layers}
        return {"rows": sizes.rows, "layers": policy.model_config.num_layers}

    try:
        memory = device_memory()
        policy, sizes = open_bench(options, memory)
        found = bench_phases(policy, sizes, phases, runs, memory, report, rates)
        emit({"sizes": found["sizes"], "described": describe_model(policy)})
    # What a compiler or a device may raise where memory is short has many types; the next sizes are tried all the same.
    except Exception as error:
        kind = "left_out" if isinstance(error, ValueError) else "error"
        text = cut(str(error).splitlines()[0], 300) if kind == "left_out" else error_text(error)
        emit(what | {"rows": None if phases == TRAINING_PHASES else options.rows, "phase": ", ".join(left), kind: text})


STEPS = {step.__name__: step for step in (devices, parity, quickstart, model)}


def main(step: str, size: str, *arguments: str) -> int:
    """Run a step; returns the exit code."""
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
            STEPS[step](size, emit, *arguments)
    # The step ends here, and its parent has to hear why in one line.
    except Exception as error:
        traceback.print_exc()
        emit({"failed": error_text(error)})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
