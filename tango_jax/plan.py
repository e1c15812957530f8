"""What a run needs, before a machine is rented: memory of each device, bytes sent, FLOPs, and a guess at the time.

    python -m tango_jax.plan --config=qwen2_5_math_7b --target=a100-80gb:32 [--json]

compiles the run's own jitted functions for the target from shapes alone: no weights, no hub, no accelerator. It needs
the target's compiler, which is a package: jax-cuda12-plugin, jax-cuda12-pjrt and nvidia-cudnn-cu12 for GPUs, libtpu for
TPUs, in the release of the installed jax. Without it, virtual CPU devices stand in, and memory is roughly right only.

    --target=NAME[:DEVICES]   a100-80gb, h100, tpu-v5p, tpu-v5e, or cpu (this machine, DEVICES virtual ones)
    --per-process=N           devices of a process; by default all of a host
    --filled=SHARE            mean length of prompts and responses, of the longest allowed; default 0.5. Times only
    --json                    one JSON object and nothing else
    --config.key=value        as for `tango_jax.train`

Exit code 0, also where the run does not fit (`fits` says so); 1 for a mistake.
"""

import json
import re
import sys
from collections.abc import Sequence

import jax

from tango_jax.cli.command_line import DEFAULT_CONFIG, load_config
from tango_jax.cli.validation import validate
from tango_jax.planning.planner import Options, make_plan
from tango_jax.planning.report import as_json, show
from tango_jax.planning.targets import parse_target
from tango_jax.runtime import failures
from tango_jax.runtime.checks import cut
from tango_jax.runtime.console import Console


def parse_options(argv: list[str]) -> Options:
    """Raises ValueError on a mistake."""
    path, target, per_process, filled, is_json, overrides = DEFAULT_CONFIG, "cpu:1", "", "0.5", False, []
    for argument in argv:
        name, separator, value = argument.partition("=")
        if argument == "--json":
            is_json = True
        elif name == "--config" and separator:
            path = value
        elif name.startswith("--config."):
            overrides.append(argument.removeprefix("--config."))
        elif name == "--target" and separator:
            target = value
        elif name == "--per-process" and value:
            per_process = value
        elif name == "--filled" and separator:
            filled = value
        else:
            raise ValueError(f"unknown argument {argument!r}; --help shows the usage")
    share = _share(filled)
    config = load_config(path, overrides)
    validate(config)
    kind, devices = parse_target(target)
    is_number = re.fullmatch(r"[0-9]{1,9}", per_process) is not None
    own = int(per_process) if is_number else min(kind.per_host, devices)
    if (per_process and not is_number) or own < 1 or devices % own or own > kind.per_host:
        raise ValueError(f"--per-process={cut(per_process)}: choose a number of devices that divides {devices} and is "
                         f"at most the {kind.per_host} of a host")
    return Options(config, kind, devices, own, share, is_json)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ValueError(f"--filled={cut(text)}: the mean length, as a share of the longest, must be above 0 and "
                         "at most 1")
    return share


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command with these arguments, by default those of the process."""
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        print(__doc__.strip())
        return
    # Before any backend starts: compilers are used, devices that may be here are not.
    jax.config.update("jax_platforms", "cpu")
    try:
        options = parse_options(argv)
        console = Console(enabled=not options.is_json)
        plan = make_plan(options, console)
        if options.is_json:
            print(json.dumps(as_json(plan)), flush=True)
        else:
            show(plan, console)
    except failures.EXPECTED as error:
        sys.exit(failures.last_line(error))


if __name__ == "__main__":
    main()
