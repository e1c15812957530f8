"""Export a policy of a run as a Hugging Face folder: weights, tokenizer, generation config and a model card.

    python -m tango_jax.export --workdir=runs/last_letter --role=generator --out=exported/generator

Exports the newest checkpoint in DIR: that of stage 2 if there is one, otherwise that of stage 1. With --config=FILE
(and --config.key=value), the command fails unless the run was made with these settings.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tango_jax.cli.arguments import Parser
from tango_jax.cli.command_line import load_config
from tango_jax.config import flatten
from tango_jax.runtime import failures, hosts
from tango_jax.runtime.checks import cut, folder_to_write, local_path
from tango_jax.tracking.metrics import read_metrics
from tango_jax.tracking.run_config import check_same_settings
from tango_jax.weights.to_hf import export_hf, model_card
from tango_jax.weights.workdir import newest_checkpoints, open_workdir, read_config

ROLES = ("generator", "verifier")


def export(workdir: Path, role: str, out: Path, dtype: str | None = None) -> Path:
    """Write the folder and return its path. `dtype` is the storage dtype; by default weights keep theirs, bit by bit.

    Raises:
        ValueError: there is no run or no checkpoint, the output folder is in use, or the model has no Hugging Face
            class.
    """
    source, settings = open_workdir(workdir, role), read_config(workdir)
    directory, part = newest_checkpoints(workdir, role)
    stage = "reinforcement learning" if len(part) == 2 else "stage 1 (SFT)"
    base = source.base_model or settings[role].checkpoint
    card = model_card(
        f"{role.capitalize()} of a run of RL Tango, after {stage}",
        source.base_model,
        {"role": role, "started from": base or "random weights"} | flatten(settings),
        last_metrics(workdir, role),
    )
    with tempfile.TemporaryDirectory() as folder:
        source.write_tokenizer(Path(folder))
        return export_hf(
            out,
            source.model_config,
            source.load_params(),
            source.architecture,
            tokenizer_folder=folder,
            generation_config=source.generation,
            card=card,
            dtype=dtype,
        )


def last_metrics(workdir: Path, role: str) -> dict:
    """The newest evaluation metrics of the role that the run has written, without timings."""
    for path in (workdir / "metrics.jsonl", workdir / "sft" / role / "metrics.jsonl"):
        rows = [row for row in read_metrics(path) if row["phase"] in ("eval", "sft")] if path.is_file() else []
        if rows:
            return {name: value for name, value in rows[-1].items() if name == "step" or name.startswith(f"{role}/")}
    return {}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 after one line on standard error that says what to change."""
    parser = Parser("export", __doc__)
    parser.add_argument("--workdir", required=True, help="folder of the run")
    parser.add_argument("--role", choices=ROLES, default="generator", help="default: %(default)s")
    parser.add_argument("--out", required=True, help="folder to write; it must not exist, or be empty")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="what to store; default: as it is")
    parser.add_config(default=None)
    try:
        args, overrides = parser.parse_overrides(argv)
        if overrides and not args.config:
            raise ValueError(f"--config.{cut(overrides[0])} needs --config=FILE, which it changes")
        hosts.check_devices()
        workdir, out = local_path("--workdir", args.workdir), folder_to_write("--out", args.out)
        if out.is_dir() and any(out.iterdir()):  # checked before the weights are read
            raise ValueError(f"--out={out} exists already and is not an empty folder: choose another, or remove it")
        if args.config:
            config = load_config(args.config, overrides)
            check_same_settings(config, workdir / "config.json")
        folder = export(workdir, args.role, out, args.dtype)
        files = json.dumps(sorted(path.name for path in folder.iterdir()))
        print(f"{folder}: {files}", flush=True)
    except failures.EXPECTED as error:
        return failures.report(error, 2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
