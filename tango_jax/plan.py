"""Plans a run before you rent a machine: memory of each device, and predicted times.

    python -m tango_jax.plan --config=qwen2_5_math_7b --target=a100-80gb:32 [--json]

compiles the run's jitted functions for the target from shapes alone, without weights, hub or accelerator. own_problems
is fitted to the target. A checkpoint is a folder, a .gguf file, a workdir, or a hub id with known sizes
(weights/presets.py). The target's compiler is a package in the release of the installed jax: jax-cuda12-plugin,
jax-cuda12-pjrt and nvidia-cudnn-cu12 for GPUs, libtpu for TPUs. Without it, virtual CPU devices stand in, and memory is
only roughly right.

Without a configuration, --target=l4:1 lists in a minute or two which published models fit, trained in full and with
adapters, and how long a turn takes.

Times are intervals, from the quickest to the slowest published measurement of such work, for the lengths of --lengths
(planning/assumed_lengths.py). --measured=RUN compares the phases of a finished run (its workdir) with their prediction.

The exit code is 0 even if the run does not fit (see `fits`), and 2 for a mistake.
"""

import functools
import json
import sys
from collections.abc import Sequence

import jax

from tango_jax.cli.arguments import CHOICES, Parser
from tango_jax.cli.command_line import load_options
from tango_jax.cli.validation import validate
from tango_jax.planning.assumed_lengths import DEFAULT, FORMS, parse_lengths
from tango_jax.planning.machines import planned_for
from tango_jax.planning.measured import beside, open_run
from tango_jax.planning.measured import show as show_beside
from tango_jax.planning.plan_tables import as_json, show
from tango_jax.planning.run_plan import PlanOptions, make_plan
from tango_jax.planning.targets import TARGETS, machine_of, open_target, parse_target, reserve_devices
from tango_jax.planning.which_models import show_models, which_models
from tango_jax.runtime.console import Console
from tango_jax.runtime.failures import ends_in_one_line


def parse_options(argv: Sequence[str] | None) -> tuple[PlanOptions | None, str, bool]:
    """What to plan, the run of --measured, and whether to print JSON. Raises ValueError."""
    usage = ("%(prog)s --config=FILE[:arg] [--config.key=value ...] --target=NAME[:DEVICES] [--per-process=N] "
             "[--lengths=LENGTHS] [--json] | --measured=RUN [--json]")
    parser = Parser("plan", __doc__, usage)
    words = sys.argv[1:] if argv is None else argv
    names = {word.partition("=")[0] for word in words if word.startswith("--")}
    looks_back = "--measured" in names
    asks_for_models = "--target" in names and not any(name.startswith("--config") for name in names)
    parser.add_config(choices="" if looks_back or asks_for_models else CHOICES)
    parser.add_argument("--target", metavar="NAME:DEVICES", default="cpu:1",
                        help=f"{', '.join(TARGETS)}, or cpu: virtual devices of this machine; default: %(default)s")
    parser.add_argument("--per-process", metavar="N", type=int, help="devices of a process; default: all of a host")
    parser.add_argument("--lengths", metavar="LENGTHS", default=DEFAULT,
                        help=f"lengths of prompts and responses, on which the times depend: {FORMS}. MEAN and PROMPT "
                        "are tokens or, below 1, a share of the longest; default: %(default)s")
    parser.add_argument("--measured", metavar="RUN", default="",
                        help="the workdir of a finished run: print its phases, predicted and measured")
    parser.add_flag("--json", "print one JSON object and nothing else")
    args, overrides = parser.parse_overrides(argv)
    if looks_back or asks_for_models:
        parser.refuse_others(args)
    if looks_back:
        if others := sorted(names - {"--measured", "--json"}):
            raise ValueError(f"--measured stands alone or with --json: remove {', '.join(others)}")
        if not args.measured:
            raise ValueError("--measured needs the workdir of a finished run")
        return None, args.measured, args.json
    name, devices = parse_target(args.target)
    machine, config, lengths = machine_of(name, devices, args.per_process), None, parse_lengths(args.lengths)
    if not asks_for_models:
        reserve_devices(name, devices)
        with planned_for(machine):
            config = load_options(parser, args, overrides)
        validate(config)
        lengths.check(config)
    target = open_target(name, devices)
    return PlanOptions(config, target, devices, machine.per_process, lengths, args.json), "", args.json


def main(argv: Sequence[str] | None = None) -> None:
    # Only compilers are used, even where the machine has devices.
    jax.config.update("jax_platforms", "cpu")
    with ends_in_one_line():
        options, workdir, is_json = parse_options(argv)
        console = Console(enabled=not is_json)
        if workdir:
            found = beside(run := open_run(workdir))
            answer = {"target": run.target, "devices": run.devices, "phases": [one._asdict() for one in found]}
            show_fn = functools.partial(show_beside, run, found)
        elif options.config is None:
            machine = machine_of(options.target.name, options.devices, options.per_process)
            found = which_models(options.target, machine, options.lengths)
            answer = [fit._asdict() for fit in found]
            show_fn = functools.partial(show_models, found, options.target, machine)
        else:
            for note in options.config.notes.splitlines():
                console.log(note)
            plan = make_plan(options, console)
            answer, show_fn = as_json(plan), functools.partial(show, plan)
        if is_json:
            print(json.dumps(answer), flush=True)
        else:
            show_fn(console)


if __name__ == "__main__":
    main()
