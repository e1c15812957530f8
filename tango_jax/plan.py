"""What a run needs, before a machine is rented: memory of each device, bytes sent, FLOPs, and a guess at the time.

    python -m tango_jax.plan --config=qwen2_5_math_7b --target=a100-80gb:32 [--json]

compiles the run's own jitted functions for the target from shapes alone: no weights, no hub, no accelerator. What
own_problems fits to the machine, it fits to the target. A checkpoint is a folder, a .gguf file, a workdir, or a hub id
whose sizes are known (weights/presets.py). Compiling needs the target's compiler, which is a package:
jax-cuda12-plugin, jax-cuda12-pjrt and nvidia-cudnn-cu12 for GPUs, libtpu for TPUs, in the release of the installed jax.
Without it, virtual CPU devices stand in, and memory is roughly right only.

Without a configuration, --target=l4:1 answers which published models the target has room for, trained in full and with
adapters, and how long a turn takes: by arithmetic, at once.

With --search it looks for quicker settings that fit: meshes, offload, decode_tensor, row_buckets, cache_tokens, remat
and micro-batches of both roles. It counts hundreds, compiles the configuration and the best few, and prints these as
--config.key=value, with all that it tried.

Exit code 0, also where the run does not fit (`fits` says so); 2 for a mistake.
"""

import json
import sys
from collections.abc import Sequence

import jax

from tango_jax.cli.arguments import CHOICES, Parser
from tango_jax.cli.command_line import load_options
from tango_jax.cli.ranges import check_options
from tango_jax.cli.validation import validate
from tango_jax.planning.machines import planned_for
from tango_jax.planning.plan_tables import as_json, show
from tango_jax.planning.run_plan import PlanOptions, make_plan
from tango_jax.planning.search import search
from tango_jax.planning.search_tables import search_as_json, show_search
from tango_jax.planning.targets import TARGETS, machine_of, open_target, parse_target, reserve_devices
from tango_jax.planning.which_models import show_models, which_models
from tango_jax.runtime.checks import shortened
from tango_jax.runtime.console import Console
from tango_jax.runtime.failures import ends_in_one_line
from tango_jax.runtime.keys import SHARE_ABOVE_ZERO

RANGES = {
    "filled": SHARE_ABOVE_ZERO._replace(why=": it is the mean length of prompts and responses, as a share of the limit")
}


def parse_options(argv: Sequence[str] | None) -> tuple[PlanOptions, bool]:
    """The options, whose config is None where models are asked for, and whether to search. Raises ValueError on a
    mistake."""
    usage = ("%(prog)s --config=FILE[:arg] [--config.key=value ...] --target=NAME[:DEVICES] [--per-process=N] "
             "[--filled=SHARE] [--search] [--json]")
    parser = Parser("plan", __doc__, usage)
    words = sys.argv[1:] if argv is None else argv
    asks_for_models = any(word.split("=")[0] == "--target" for word in words) and not any(
        word.startswith("--config") or word == "--search" for word in words)
    parser.add_config(choices="" if asks_for_models else CHOICES)
    parser.add_argument("--target", metavar="NAME:DEVICES", default="cpu:1",
                        help=f"{', '.join(TARGETS)}, or cpu: virtual devices of this machine; default: %(default)s")
    parser.add_argument("--per-process", metavar="N", type=int, help="devices of a process; default: all of a host")
    parser.add_argument("--filled", metavar="SHARE", type=float, default=0.5,
                        help="mean length of prompts and responses, as a share of the longest allowed; only the times "
                        "depend on it; default: %(default)s")
    parser.add_flag("--search", "look for quicker settings that fit")
    parser.add_flag("--json", "print one JSON object and nothing else")
    args, overrides = parser.parse_overrides(argv)
    check_options(args, RANGES)
    name, devices = parse_target(args.target)
    if asks_for_models:
        parser.refuse_others(args)
        return PlanOptions(None, open_target(name, devices), devices, devices, args.filled, args.json), False
    reserve_devices(name, devices)
    with planned_for(machine_of(name, devices)):
        config = load_options(parser, args, overrides)
    validate(config)
    kind = open_target(name, devices)
    per_process = min(kind.per_host, devices) if args.per_process is None else args.per_process
    if per_process < 1 or devices % per_process or per_process > kind.per_host:
        raise ValueError(f"--per-process={shortened(per_process)}: choose a number of devices that divides {devices} "
                         f"and is at most the {kind.per_host} of a host")
    return PlanOptions(config, kind, devices, per_process, args.filled, args.json), args.search


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command with these arguments, by default those of the process."""
    # Before any backend starts: compilers are used, devices that may be here are not.
    jax.config.update("jax_platforms", "cpu")
    with ends_in_one_line():
        options, is_search = parse_options(argv)
        console = Console(enabled=not options.is_json)
        if options.config is None:
            answer_models(options, console)
            return
        for note in options.config.notes.splitlines():
            console.log(note)
        if is_search:
            found = search(options, console)
            if options.is_json:
                print(json.dumps(search_as_json(found)), flush=True)
            else:
                show_search(found, console)
            return
        plan = make_plan(options, console)
        if options.is_json:
            print(json.dumps(as_json(plan)), flush=True)
        else:
            show(plan, console)


def answer_models(options: PlanOptions, console: Console) -> None:
    """Print which models the target has room for."""
    machine = machine_of(options.target.name, options.devices)
    found = which_models(options.target, machine, options.filled)
    if options.is_json:
        print(json.dumps([fit._asdict() for fit in found]), flush=True)
    else:
        show_models(found, options.target, machine, console)


if __name__ == "__main__":
    main()
