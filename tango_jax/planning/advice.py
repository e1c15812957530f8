"""What to change where a plan does not fit, in numbers."""

from tango_jax.method.own_arm import alike
from tango_jax.planning.job import Job
from tango_jax.planning.memory import Phase
from tango_jax.planning.targets import GIB, Target
from tango_jax.rl.less_memory import less_memory


def advice(job: Job, phases: list[Phase], target: Target) -> list[str]:
    """A line for each phase that is too large and for each change that helps; none where everything fits."""
    lines, available = [], target.memory
    for phase in phases:
        if phase.error:
            lines.append(f"{phase.name} does not compile for this memory: {phase.error}")
        elif phase.peak > available:
            lines.append(f"{phase.name} needs {phase.peak / GIB:.1f} GiB of {available / GIB:.1f} GiB")
    full = [phase for phase in phases if phase.error or phase.peak > available]
    changes = dict.fromkeys(change for phase in full for change in _changes(job, phase, target))
    return lines + [f"try {change}" for change in changes]


def _changes(job: Job, phase: Phase, target: Target) -> list[str]:
    role, name = phase.name.split("/")
    policy, held = job.policies[role], None
    if phase.optimizer:
        held = f", of the {(phase.parameters + phase.optimizer) / GIB:.1f} GiB that states and references take now"
    changes = less_memory(policy, name, alike(job.config), policy.is_scored, held)
    if name == "sample" and job.processes > 1 and policy.placement.local.size < target.per_host:
        changes.insert(0, f"one process for the {target.per_host} devices of a host: they share the rows of a batch")
    return [*changes, "more devices of the target"]
