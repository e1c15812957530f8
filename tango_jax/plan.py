"""What a run needs, before a machine is rented: memory of each device, bytes sent, FLOPs, and a guess at the time.

    python -m tango_jax.plan --config=qwen2_5_math_7b --target=a100-80gb:32 [--json]

compiles the run's own jitted functions for the target from shapes alone: no weights, no hub, no accelerator. What
own_problems fits to the machine, it fits to the target. A checkpoint is a folder, a .gguf file, a workdir, or a hub id
whose sizes are known (weights/presets.py). Compiling needs the target's compiler, which is a package:
jax-cuda12-plugin, jax-cuda12-pjrt and nvidia-cudnn-cu12 for GPUs, libtpu for TPUs, in the release of the installed jax.
Without it, virtual CPU devices stand in, and memory is roughly right only.

Without a configuration, --target=l4:1 answers which published models the target has room for, trained in full and with
adapters, and how long a turn takes: by arithmetic, at once.

Times are intervals: from the work and a data sheet's rates, and the shares of these that published measurements of the
same kind of work have reached on such devices. --published prints these measurements, each beside what is predicted for
it. --measured=RUN does the same for each phase of a finished run (its workdir), and tells the shares that its machine
has reached; --shares=RUN, beside a configuration and a target of the same kind, plans with these.

With --search it looks for quicker settings that fit: meshes, offload, decode_tensor, row_buckets, cache_tokens, remat
and micro-batches of both roles. It counts hundreds, compiles the configuration and the best few, and prints these as
--config.key=value, with all that it tried.

Exit code 0, also where the run does not fit (`fits` says so); 2 for a mistake.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import NamedTuple

import jax

from tango_jax.cli.arguments import CHOICES, Parser
from tango_jax.cli.command_line import load_options
from tango_jax.cli.ranges import check_options
from tango_jax.cli.validation import validate
from tango_jax.planning.fitted import published_as_json, reached, show_published
from tango_jax.planning.machines import planned_for
from tango_jax.planning.measured import as_json as beside_as_json
from tango_jax.planning.measured import beside, open_run
from tango_jax.planning.measured import show as show_beside
from tango_jax.planning.plan_tables import as_json, show
from tango_jax.planning.run_plan import PlanOptions, make_plan
from tango_jax.planning.search import search
from tango_jax.planning.search_tables import search_as_json, show_search
from tango_jax.planning.targets import TARGETS, Target, machine_of, open_target, parse_target, reserve_devices
from tango_jax.planning.which_models import show_models, which_models
from tango_jax.runtime.console import Console
from tango_jax.runtime.failures import ends_in_one_line
from tango_jax.runtime.keys import SHARE_ABOVE_ZERO


class Asked(NamedTuple):
    """What the command line asks for."""

    options: PlanOptions | None = None  # whose config is None where models are asked for
    is_search: bool = False
    is_published: bool = False
    measured: str = ""  # a workdir
    is_json: bool = False


RANGES = {
    "filled": SHARE_ABOVE_ZERO._replace(why=": it is the mean length of prompts and responses, as a share of the limit")
}


def parse_options(argv: Sequence[str] | None) -> Asked:
    """What is asked for. Raises ValueError on a mistake."""
    usage = ("%(prog)s --config=FILE[:arg] [--config.key=value ...] --target=NAME[:DEVICES] [--per-process=N] "
             "[--filled=SHARE] [--shares=RUN] [--search] [--json] | --published | --measured=RUN")
    parser = Parser("plan", __doc__, usage)
    words = sys.argv[1:] if argv is None else argv
    names = {word.partition("=")[0] for word in words if word.startswith("--")}
    looks_back = names & {"--published", "--measured"}
    asks_for_models = "--target" in names and "--search" not in names and not any(
        name.startswith("--config") for name in names)
    parser.add_config(choices="" if looks_back or asks_for_models else CHOICES)
    parser.add_argument("--target", metavar="NAME:DEVICES", default="cpu:1",
                        help=f"{', '.join(TARGETS)}, or cpu: virtual devices of this machine; default: %(default)s")
    parser.add_argument("--per-process", metavar="N", type=int, help="devices of a process; default: all of a host")
    parser.add_argument("--filled", metavar="SHARE", type=float, default=0.5,
                        help="mean length of prompts and responses, as a share of the longest allowed; only the times "
                        "depend on it; default: %(default)s")
    parser.add_argument("--shares", metavar="RUN", default="",
                        help="the workdir of a finished run, whose machine has reached the shares to plan with")
    parser.add_argument("--measured", metavar="RUN", default="",
                        help="the workdir of a finished run: print its phases, predicted and measured")
    parser.add_flag("--published", "print published measurements, each beside what is predicted")
    parser.add_flag("--search", "look for quicker settings that fit")
    parser.add_flag("--json", "print one JSON object and nothing else")
    args, overrides = parser.parse_overrides(argv)
    check_options(args, RANGES)
    if looks_back:
        parser.refuse_others(args)
        if others := sorted(names - looks_back - {"--json"}) or sorted(looks_back)[1:]:
            raise ValueError(f"{sorted(looks_back)[0]} stands alone or with --json: remove {', '.join(others)}")
        if not args.published and not args.measured:
            raise ValueError("--measured needs the workdir of a finished run, and --published no value but true")
        return Asked(is_published=args.published, measured=args.measured, is_json=args.json)
    name, devices = parse_target(args.target)
    machine, config = machine_of(name, devices, args.per_process), None
    if asks_for_models:
        parser.refuse_others(args)
    else:
        reserve_devices(name, devices)
        with planned_for(machine):
            config = load_options(parser, args, overrides)
        validate(config)
    kind = _with_shares(open_target(name, devices), devices, args.shares)
    options = PlanOptions(config, kind, devices, machine.per_process, args.filled, args.json)
    return Asked(options, args.search, is_json=args.json)


def _with_shares(target: Target, devices: int, run: str) -> Target:
    """The target with the shares that are published, or that a run has reached. Raises ValueError."""
    if not run:
        return dataclasses.replace(target, reached=reached(target, devices))
    opened = open_run(run)
    if opened.target != target.name:
        raise ValueError(f"--shares={run} ran on {opened.target}, and --target is {target.name}: give "
                         f"--target={opened.target}, or a run of {target.name}")
    return dataclasses.replace(target, reached=beside(opened, target if opened.devices == devices else None).reached)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command with these arguments, by default those of the process."""
    # Before any backend starts: compilers are used, devices that may be here are not.
    jax.config.update("jax_platforms", "cpu")
    with ends_in_one_line():
        asked = parse_options(argv)
        options, console = asked.options, Console(enabled=not asked.is_json)
        if asked.is_published:
            answer_published(asked.is_json, console)
            return
        if asked.measured:
            found = beside(open_run(asked.measured))
            if asked.is_json:
                print(json.dumps(beside_as_json(found)), flush=True)
            else:
                show_beside(found, console)
            return
        if options.config is None:
            answer_models(options, console)
            return
        for note in options.config.notes.splitlines():
            console.log(note)
        if asked.is_search:
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


def answer_published(is_json: bool, console: Console) -> None:
    """Print the published measurements."""
    if is_json:
        print(json.dumps(published_as_json()), flush=True)
    else:
        show_published(console)


def answer_models(options: PlanOptions, console: Console) -> None:
    """Print which models the target has room for."""
    machine = machine_of(options.target.name, options.devices, options.per_process)
    found = which_models(options.target, machine, options.filled)
    if options.is_json:
        print(json.dumps([fit._asdict() for fit in found]), flush=True)
    else:
        show_models(found, options.target, machine, console)


if __name__ == "__main__":
    main()
