"""Export a policy of a run as a Hugging Face folder: weights, tokenizer, generation config, prompt template and a card.

    python -m tango_jax.export --workdir=runs/last_letter --role=generator --out=exported/generator

The newest checkpoint is exported, from stage 2 if there is one, otherwise from stage 1; with --best, the one that
checkpoint.keep_best kept. Adapters are merged into their base; --adapter exports them alone, as a folder of the peft
library. peft reads no .gguf file, so a base in one is written into the folder, as OUT/base. --push=OWNER/NAME then
uploads the folder to the Hugging Face hub, as a private repository if it is new. With --config=FILE (and
--config.key=value), the command fails unless the run was made with these settings.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from tango_jax.cli.arguments import Parser
from tango_jax.cli.command_line import load_options
from tango_jax.config import ROLES, default_config, flatten
from tango_jax.data.problem_sets import resolve
from tango_jax.data.rows import hub_repo, short_name
from tango_jax.loop.init_from import UNTRAINED, sft_directory
from tango_jax.runtime import hosts
from tango_jax.runtime.checkpoint import peek_meta
from tango_jax.runtime.checks import cut, folder_to_write, local_path, require
from tango_jax.runtime.failures import ends_in_one_line
from tango_jax.runtime.model_text import on_one_line
from tango_jax.runtime.sealed import newest_verified
from tango_jax.runtime.stored_arrays import read_stored
from tango_jax.tasks.registry import example_solution
from tango_jax.tasks.self_text import SELF
from tango_jax.text.templates import load_template, templates_digest
from tango_jax.text.tokenizer import Tokenizer, is_readable
from tango_jax.tracking.metrics import read_metrics
from tango_jax.tracking.provenance import read_provenance
from tango_jax.tracking.run_config import check_same_settings
from tango_jax.tracking.scores import LEFT_OUT
from tango_jax.weights.hf_layout import TEXT_PARTS
from tango_jax.weights.model_card import Training, model_card
from tango_jax.weights.peft_folder import BASE_FOLDER, read_lora_config, write_adapter
from tango_jax.weights.prompting import NO_EXAMPLE, Example, Prompting
from tango_jax.weights.push import check_push, push
from tango_jax.weights.source import Source, kind_of, open_source
from tango_jax.weights.to_hf import export_hf
from tango_jax.weights.workdir import (
    best_step,
    check_base,
    full_stage_one,
    has_one_policy,
    newest_checkpoints,
    open_workdir,
    prompting_in_run,
    read_adapters,
    read_config,
    settings_of,
    start_source,
    what_chose,
)

_COUNT = jax.ShapeDtypeStruct((), jnp.int32)


def export(workdir: Path, role: str, out: Path, dtype: str | None = None, is_best: bool = False) -> Path:
    """Write the folder and return its path. `dtype`: storage dtype; None keeps the weights bit by bit. Raises
    ValueError."""
    only = best_step(workdir) if is_best else None
    source, settings = open_workdir(workdir, role, only=only), read_config(workdir)
    require(not source.model_config.score_head, f"the {role} of {workdir} is a process reward model, which no run "
            f"changes: copy {settings[role].checkpoint}")
    params = source.open_params()  # read one at a time as they are written; a damaged checkpoint is found here
    promptings = promptings_of(workdir, role, settings, is_best)
    card = card_of(workdir, role, source, only, promptings[0] if promptings else None)
    return write_model(out, source, params, card, promptings=promptings, dtype=dtype)


def write_model(out: Path, source: Source, params: dict, card: str, **options: Any) -> Path:
    """Write a Hugging Face folder with the source's tokenizer. `options`: of `export_hf`."""
    with tempfile.TemporaryDirectory() as folder:
        source.write_tokenizer(Path(folder))
        return export_hf(
            out,
            source.model_config,
            params,
            source.architecture,
            tokenizer_folder=folder,
            generation_config=source.generation,
            card=card,
            **options,
        )


def stage_ones(workdir: Path, role: str) -> list[str]:
    """The workdirs of the stage 1 that trained the weights with which the role's reinforcement learning begins: this
    run's, or that of another run in init_from; of one policy, and of a verifier that starts as the generator, of each
    role. Empty: none did."""
    settings, is_one = read_config(workdir), has_one_policy(workdir)
    source = settings[role].init_from
    if role == "verifier" and source and not is_one:  # that run says what its verifier began with
        return stage_ones(Path(source).expanduser(), role) if settings_of(source) else [source]

    def is_trained(name: str) -> bool:
        own = settings[name]
        found = peek_meta(sft_directory(own.init_from or workdir, name) / "checkpoints")
        return not found.meta.get(UNTRAINED) if found else bool(own.sft.steps or own.init_from)

    own = settings[role].sft
    roles = ROLES if is_one or (role == "verifier" and own.steps and own.start == "generator") else (role,)
    return [settings[name].init_from or str(workdir) for name in roles if is_trained(name)]


def export_adapter(workdir: Path, role: str, out: Path, is_best: bool = False, is_pushed: bool = False) -> Path:
    """Write a role's newest or best adapters as a PEFT folder and return its path. With a .gguf file as base, it also
    holds the base. `is_pushed`: it is then uploaded. Raises ValueError."""
    only = best_step(workdir) if is_best else None
    settings = read_config(workdir)
    source = start_source(settings, role, is_one_policy=has_one_policy(workdir))
    model = source.model_config
    if not model.lora:
        raise ValueError(f"{workdir} trains all parameters of the {role}: export it without --adapter")
    if source.architecture in TEXT_PARTS:
        raise ValueError(f"the {role}'s base is the text part of a model of text and images, whose layers have other "
                         "names in transformers: export it without --adapter, merged")
    base = full_stage_one(settings, workdir, role) or settings[role].checkpoint
    if isinstance(base, Path) or kind_of(base) == "workdir":
        raise ValueError(f"the {role}'s adapters in {workdir} belong to weights that a run trained ({base}), not to a "
                         "published checkpoint: export it without --adapter, merged")
    has_base = kind_of(base) == "gguf"
    require(not (has_base and is_pushed), f"--push: the {role}'s adapters in {workdir} belong to {base}, and peft "
            "finds no such base on the hub: leave out --adapter to upload the merged model, or leave out --push")
    adapters = jax.device_get(read_adapters(workdir, role, model, only))
    promptings = promptings_of(workdir, role, settings, is_best)
    card = card_of(workdir, role, source, only, promptings[0] if promptings else None, is_adapter=True,
                   base_folder=BASE_FOLDER * has_base)
    write_base_fn = make_write_base(workdir, role, source) if has_base else None
    return write_adapter(out, model, adapters, base, card, promptings, write_base_fn)


def make_write_base(workdir: Path, role: str, source: Source) -> Callable[[Path], Path]:
    """A function that writes the base of a role's adapters into a folder. ValueError: it has changed since the run."""
    params = source.open_params()
    check_base(newest_checkpoints(workdir, role)[0], role, source.model_config, params)
    card = model_card(f"{Path(source.name).name} as a Hugging Face folder", {}, None, Training(licence=source.licence))
    return lambda folder: write_model(folder, source, params, card)


def card_of(
    workdir: Path, role: str, source: Source, only: int | None, prompting: Prompting | None, is_adapter: bool = False,
    base_folder: str = "",
) -> str:
    settings, (directory, part) = read_config(workdir), newest_checkpoints(workdir, role)
    # The step that is read.
    is_stage_one, step = len(part) == 1, newest_verified(directory, part=part) if only is None else only
    stored, metrics = read_provenance(workdir), directory.parent / "metrics.jsonl"
    chosen_by = what_chose(workdir, settings, role, only is not None)
    arm = stored.get("arm") or {}
    rows = [row for row in read_metrics(metrics) if row["step"] <= step] if metrics.is_file() else []
    # A checkpoint holds both roles, whatever was trained. Those of a fork count the updates before it as well.
    updates = 0 if is_stage_one else int(read_stored(directory / str(step), f"{part[0]}/step", _COUNT))
    taught_by = stage_ones(workdir, role)
    stage = ("after reinforcement learning" if updates else "after stage 1 (SFT)" if taught_by
             else "not trained by it")
    whose = "One policy in both roles" if has_one_policy(workdir) else role.capitalize()
    measured = directory.parent.name if is_stage_one else role  # one policy may have the other role's stage 1
    # Later rows belong to weights that were not saved.
    row = next((row for row in reversed(rows) if row["phase"] in ("eval", "sft")), {})
    left_out = f"; {LEFT_OUT}" * (settings.verifier.stop_at_first_error and "verifier/pool/step_f1" in row
                                  and measured == "verifier")
    return model_card(
        f"{whose} of a run of {arm.get('label', 'RL Tango')}, {stage}",
        {name: value for name, value in row.items() if name.startswith(f"{measured}/")},
        prompting,
        training_of(settings, stored, source, taught_by),
        trained=moment(step, is_stage_one) + _of_fork(stored) + f", chosen by {chosen_by}" * bool(chosen_by),
        evaluated=moment(row["step"], is_stage_one) + left_out if row else "",
        example=example_of(settings, source.tokenizer),
        is_adapter=is_adapter,
        base_folder=base_folder,
    )


def training_of(
    settings: ConfigDict, stored: Mapping[str, Any], source: Source, taught_by: Sequence[str]
) -> Training:
    """`stored`: the run's provenance; `taught_by`: `stage_ones`."""
    command = (stored.get("attempts") or [{}])[-1].get("command", "")
    problems, named = _problems(flatten(settings))
    texts = [_imitated(place, problems) for place in taught_by]
    told = " and ".join(dict.fromkeys(text for text, _ in texts if text))
    datasets = filter(None, map(hub_repo, [named, *(source for _, sources in texts for source in sources)]))
    # A Python program has no command.
    return Training(source.base_model, source.licence, problems + f"; stage 1 imitates {told}" * bool(told),
                    tuple(dict.fromkeys(datasets)), command if " " in command else "")


def _problems(settings: Mapping[str, Any]) -> tuple[str, str]:
    """Problems of a run in words, and their source."""
    if settings["task.name"] != "math":
        return f"of the task {Path(settings['task.name']).name}", ""
    source = str(resolve(settings["task.train"])[0])
    return short_name(source), source


def _imitated(workdir: str, problems: str) -> tuple[str, list[str]]:
    """What the stage 1 in a workdir imitates, in words, and sources of it. `problems`: of the run that is exported."""
    found = settings_of(workdir)
    if "task.name" not in found:
        return f"what the run {Path(workdir).name} did, whose settings are gone", []
    settings = flatten(default_config()) | found  # an earlier version had fewer keys
    (own, source), stage_one = _problems(settings), settings["task.stage_one"]
    if settings["task.name"] != "math":
        return ("" if own == problems else f"texts {own}"), []
    if stage_one == "gsm8k":
        return ("their worked answers" if own == problems else f"the worked answers of {own}"), [source]
    if stage_one == SELF:
        return "the model's own samples that are right", []
    return short_name(stage_one), [stage_one]


def promptings_of(workdir: Path, role: str, settings: ConfigDict, is_best: bool) -> list[Prompting]:
    """Of the exported role first, and of one policy in both roles; none where one is unknown."""
    directory, _ = newest_checkpoints(workdir, role)
    roles = sorted(ROLES if has_one_policy(workdir) else [role], key=lambda name: name != role)
    found = [prompting_of(workdir, settings, name, peek_meta(directory).meta) for name in roles]
    chosen_by = what_chose(workdir, settings, role, is_best)
    return [] if None in found else [one._replace(chosen_by=chosen_by) for one in found]


def prompting_of(workdir: Path, settings: ConfigDict, role: str, meta: dict) -> Prompting | None:
    """How the run prompted a role; None if its template file is gone or has changed."""
    try:
        templates = {name: load_template(name, settings[name].template) for name in ROLES}
        digest = templates_digest(templates)
        # Stage 1 stores one digest of examples and prompts together, which cannot be compared.
        if "source_fingerprint" in meta and meta["source_fingerprint"]["templates"] != digest:
            raise ValueError("a template file has changed since the run")
        return prompting_in_run(workdir, settings, role, templates[role])
    except ValueError as error:
        print(on_one_line(f"warning: the card shows no prompt: {error}"), file=sys.stderr)
        return None


def example_of(settings: ConfigDict, tokenizer: Tokenizer) -> Example:
    """The card's example: a problem of the task if it makes its own, else a sum, if the tokenizer can read it."""
    example, own = Example(), example_solution(settings)
    if own is not None:
        problem, solution = own
        example = Example(problem.question, solution, solution.count("</step>"))
    is_known = is_readable(tokenizer, example.problem) and is_readable(tokenizer, example.solution)
    return example if is_known else NO_EXAMPLE


def moment(step: int, is_stage_one: bool) -> str:
    if is_stage_one and step:
        return f"after step {step} of stage 1"
    return f"after turn {step}" if step else "before the first turn"


def _of_fork(stored: Mapping[str, Any]) -> str:
    """Turns are counted from the fork on, and its weights were trained before."""
    fork = stored.get("fork")
    return f" of a fork of {Path(fork['run']).name} after its turn {fork['turn']}" if fork else ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("export", __doc__)
    parser.add_argument("--workdir", required=True, help="folder of the run")
    parser.add_argument("--role", choices=ROLES, default="generator", help="default: %(default)s")
    parser.add_argument("--out", required=True, help="folder to write; it must not exist, or be empty")
    parser.add_flag("--best", "the checkpoint that checkpoint.keep_best kept")
    parser.add_flag("--adapter", "the adapters alone, as a folder of the peft library; a base in a .gguf file is "
                    "written into it, as OUT/base")
    parser.add_argument("--push", metavar="OWNER/NAME", help="upload the folder to this repository of the Hugging Face "
                        "hub; if it is new, it is private")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="what to store; default: as it is")
    parser.add_config(choices="")
    with ends_in_one_line():
        args, overrides = parser.parse_overrides(argv)
        if not args.config:
            parser.refuse_others(args)
            if overrides:
                raise ValueError(f"--config.{cut(overrides[0])} needs --config=FILE, which it changes")
        hosts.check_devices()
        if args.adapter and args.dtype:
            raise ValueError(f"--dtype={args.dtype} is for merged weights; adapters are stored as trained, in float32: "
                             "leave out --dtype or --adapter")
        workdir, out = local_path("--workdir", args.workdir), folder_to_write("--out", args.out)
        if out.is_dir() and any(out.iterdir()):  # checked before the weights are read
            raise ValueError(f"--out={out} exists already and is not an empty folder: choose another, or remove it")
        if args.push is not None:
            check_push(args.push)
        if args.config:
            config = load_options(parser, args, overrides)
            check_same_settings(config, workdir / "config.json")
        if args.adapter:
            folder = export_adapter(workdir, args.role, out, args.best, args.push is not None)
        else:
            folder = export(workdir, args.role, out, args.dtype, args.best)
        files = json.dumps(sorted(path.name for path in folder.iterdir()))
        print(f"{folder}: {files}", flush=True)
        if args.push is not None:
            _ = read_lora_config(folder) if args.adapter else open_source(str(folder)).open_params()  # is it readable?
            print(push(folder, args.push), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
