"""A plan as tables for people and as JSON for programs."""

from collections.abc import Iterable

from tango_jax.config import ROLES
from tango_jax.grading.pool import DEFAULT_MAX_WORKERS
from tango_jax.models.decode_attention import attention_names
from tango_jax.planning import time_model, upkeep
from tango_jax.planning.run_plan import RunPlan
from tango_jax.planning.targets import GIB, Target, missing_compilers
from tango_jax.planning.workload import TAIL, SamplingWorkload, UpdateWorkload
from tango_jax.runtime.ahead import MOST_AT_A_TIME
from tango_jax.runtime.console import Console, format_seconds
from tango_jax.runtime.user_code import is_user_code
from tango_jax.tasks.self_text import SELF

PARTS = ("parameters", "optimizer", "weights", "cache", "gradients", "activations", "temporaries", "peak")


def as_json(plan: RunPlan) -> dict:
    """GiB and bytes of one device, seconds of a turn of the first role that has turns."""
    options, ends = plan.options, (plan.quick, plan.slow)
    is_compiled = not any(program.error for program in plan.programs.values())
    turns = plan.likely.turns
    return {
        "fits": plan.fits,
        "target": options.target.name,
        "devices": options.devices,
        "slice": options.target.slice_name(options.devices),
        "compiled_for_target": plan.is_target,
        "peak_gib_per_device": max(phase.peak for phase in plan.phases) / GIB if is_compiled else None,
        "available_gib_per_device": options.target.memory / GIB,
        "phases": {phase.name: {part: getattr(phase, part) / GIB for part in PARTS} for phase in plan.phases
                   if not phase.error},
        "predicted_seconds": next(iter(turns.values())).seconds,
        "predicted_seconds_by_turn": {role: turn.seconds for role, turn in turns.items()},
        "predicted_seconds_between": {
            role: {phase: [end.turns[role].seconds[phase] for end in ends] for phase in turn.seconds}
            for role, turn in turns.items()
        },
        "useful_tokens_by_turn": {role: turn.passes.useful for role, turn in turns.items()},
        "tail_of_decode_steps": {role: {name: done.tail for name, done in turn.sampled.items()}
                                 for role, turn in turns.items()},
        "predicted_hours": plan.hours(plan.likely),
        "predicted_hours_between": [plan.hours(end) for end in ends],
        "stage_one": {role: {"steps": steps, "seconds_of_a_step": plan.likely.stage_one[role],
                             "hours": steps * plan.likely.stage_one[role] / 3600,
                             "hours_between": [steps * end.stage_one[role] / 3600 for end in ends]}
                      for role, steps in stage_one_steps(plan).items()},
        "programs": plan.compiled,
        "compile_seconds": plan.compile_seconds,
        "notes": options.config.notes.splitlines(),
        "assumptions": assumptions(plan),
        "advice": plan.advice,
    }


def show(plan: RunPlan, console: Console) -> None:
    options, job = plan.options, plan.job
    console.log(f"{options.devices} x {options.target.name}: {job.processes} process(es) of {options.per_process}")
    if name := options.target.slice_name(options.devices):
        console.log(describe_slice(options.target, options.devices, name))
    for role, policy in job.policies.items():
        axes = " x ".join(f"{name} {size}" for name, size in policy.placement.train.shape.items())
        console.log(f"the {role}: mesh {axes}, decoding weights on {policy.config.mesh.decode_tensor} device(s) each, "
                    f"attention {attention_names(policy.model_config)}")
    rows = [(phase.name, *("-" if phase.error else getattr(phase, part) / GIB for part in PARTS))
            for phase in plan.phases]
    console.table(f"GiB of each device, of {options.target.memory / GIB:.1f} that a program may use",
                  ("phase", *PARTS), rows)
    _show_times(plan, console)
    for line in assumptions(plan):
        console.log(f"- {line}")
    basis = "" if plan.is_target else " by a rough guess"
    console.log(f"it {'fits' if plan.fits else 'does not fit'}{basis}{'' if plan.fits else ':'}")
    for line in plan.advice:
        console.log(f"- {line}")


def _show_times(plan: RunPlan, console: Console) -> None:
    turns, ends = plan.likely.turns, (plan.quick, plan.slow)
    names = list(dict.fromkeys(name for turn in turns.values() for name in turn.seconds))
    rows = [(name, *(between(*(end.turns[role].seconds.get(name, 0.0) for end in ends)) for role in turns))
            for name in names]
    rows.append(("a turn", *(between(*(end.turns[role].total for end in ends)) for role in turns)))
    console.table("Seconds, predicted: from the quickest to the slowest measurement of such work",
                  ("phase", *(f"turn of the {role}" for role in turns)), rows)
    counts = " and ".join(f"{plan.counts[role]} {role}" for role in turns)
    console.log(f"the run ({counts} turns): {_spans(3600 * plan.hours(end) for end in ends)}, most likely "
                f"{format_seconds(3600 * plan.hours(plan.likely))}, with compiling and without stage 1")
    most, left_out = ("up to ", "sampling and ") if plan.options.config.task.stage_one == SELF else ("", "")
    for role, steps in stage_one_steps(plan).items():
        console.log(f"stage 1 of the {role}: {most}{steps} steps, {most}"
                    f"{_spans(steps * end.stage_one[role] for end in ends)} in all, without {left_out}evaluation")
    told = "; ".join(f"{found.total()} of the {role} ({', '.join(f'{count} {kind}' for kind, count in found.items())})"
                     for role, found in plan.compiled.items())
    console.log(f"programs to compile before the first turn: {told}")
    console.log(f"to compile them: about {format_seconds(plan.compile_seconds)}, {plan.compile_seconds / 3600:.0%} of "
                f"the first hour, on {MOST_AT_A_TIME} cores like this machine's, without a GPU's autotuning")
    console.log("assumed:")


def stage_one_steps(plan: RunPlan) -> dict[str, int]:
    """Of all rounds with `task.stage_one=self`, which may end earlier."""
    config = plan.options.config
    rounds = config[SELF].rounds if config.task.stage_one == SELF else 1
    return {role: rounds * plan.job.policies[role].config.sft.steps for role in plan.likely.stage_one}


def between(low: float, high: float) -> str:
    """`12 to 18`, with two digits; one number where they are the same."""
    texts = [f"{value:.0f}" if value >= 10 else f"{value:.2g}" for value in (low, high)]
    return " to ".join(dict.fromkeys(texts))


def _spans(ends: Iterable[float]) -> str:
    return " to ".join(dict.fromkeys(map(format_seconds, ends)))


def describe_slice(target: Target, chips: int, name: str) -> str:
    called_so = chips // target.counted  # chips of the slice whose name has this number
    is_slice = called_so in dict(target.shapes)
    other = f" ({target.product}-{chips} is {called_so} chips)" if called_so != chips and is_slice else ""
    return f"{chips} chips with {chips * target.cores} cores: Google calls this slice {name}{other}"


def describe_update(role: str, passes: UpdateWorkload) -> str:
    sizes = " and ".join(f"{count} micro-batch(es) of {shape.total} tokens" for shape, count in passes.shapes.items())
    return f"the {role}'s update has {sizes} a shard, of which {passes.useful:.0%} are no padding"


def describe_sampling(updated: str, role: str, done: SamplingWorkload) -> str:
    if not done.segments and done.chunk_lengths:
        tokens = done.prompts * sum(done.chunk_lengths)
        return f"in the {updated}'s turn the {role}, a process reward model, reads {tokens:,} tokens, padding included"
    return (f"in the {updated}'s turn the {role} makes {done.steps:,} decode steps, {done.tail:.0%} of them with one "
            f"row in {TAIL} left or fewer")


def assumptions(plan: RunPlan) -> list[str]:
    target, options = plan.options.target, plan.options
    lines = []
    if not plan.is_target:
        missing = missing_compilers(target)
        lines.append(
            f"compiled for virtual CPU devices, because {' and '.join(missing)} {'are' if missing[1:] else 'is'} not "
            "installed (--help names the packages): memory is a rough guess, usually too high (attention scores are "
            "whole arrays there, and bfloat16 is computed in float32)"
        )
    turns = plan.likely.turns
    lines += [
        "memory is for the longest prompts and responses, and the largest decode batch with a prompt for each row",
        str(options.lengths),
        *(describe_update(role, turn.passes) for role, turn in turns.items()),
        *(describe_sampling(updated, role, done) for updated, turn in turns.items()
          for role, done in turn.sampled.items()),
        f"shares of {target.flops / 1e12:.3g} TFLOP/s (float32 {target.flops_float32 / 1e12:.3g}) and of "
        f"{target.read / 1e12:.3g} TB/s of memory reads: {target.reached.basis}",
        f"links carry {time_model.SHARE_OF_LINK:.0%} of {target.link / 1e9:.3g} GB/s, networks of "
        f"{target.network / 1e9:.3g} GB/s a device; a sum in a decode step takes {1e6 * time_model.SUM_LATENCY:.0f} us "
        "in addition",
        f"a host copies {upkeep.TO_HOST / 1e9:.3g} GB/s of a checkpoint to its memory, and writes it beside training; "
        f"grading an answer takes {1e3 * upkeep.GRADE:.0f} ms of one of {DEFAULT_MAX_WORKERS} cores a process; reading "
        "texts is not counted",
    ]
    calls = [call for one in plan.job.method.rehearsals.values() for call in one.calls.values()]
    if most := {call.prompt.name: None for call in calls if call.at_most}:
        lines.append(f"the number of prompts of the kind {' and '.join(most)} depends on earlier responses: the most "
                     "possible is counted")
    for role in ROLES:
        kinds = dict.fromkeys(call.prompt.name for call in calls if call.prompt.role == role)
        if len(kinds) > 1:
            lines.append(f"prompts of all kinds that the {role} gets ({' and '.join(kinds)}) are taken to be equally "
                         "long, which is rough")
    config = options.config
    ends = {"checkpoint.patience": config.checkpoint.patience, "rl.warmup_until": config.rl.warmup_until}
    if given := [f"{key}={value}" for key, value in ends.items() if value]:
        lines.append(f"all turns are counted, though with {' and '.join(given)} the run may have fewer")
    if is_user_code(options.config.task.name):
        lines.append(f"evaluations judge eval.pool={options.config.eval.pool} fixed solutions; a plan does not make "
                     f"task.name={options.config.task.name}: plan with eval.pool=1 if it has no pool_solution")
    if whose := " and of the ".join(role for role, one in plan.job.method.rehearsals.items() if one.resamples):
        further = options.config.rl.dynamic_sampling
        lines.append(f"a turn of the {whose} samples one batch of problems; with rl.dynamic_sampling={further} it may "
                     f"sample up to {1 + further}, and then takes up to {1 + further} times as long for the responses "
                     "that its rewards need")
    return lines
