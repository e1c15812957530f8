"""The command line of `python -m tango_jax.evaluate`, checked before any work.

Takes arguments; returns one frozen record. The settings on which a resumed evaluation depends are saved in the output
folder and compared.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tango_jax.cli.arguments import Parser
from tango_jax.cli.ranges import check_options
from tango_jax.evaluation.sets import GROUPS, SYNTHETIC_STEPS
from tango_jax.evaluation.shards import digest
from tango_jax.runtime import hosts
from tango_jax.runtime.atomic import write_json_atomic
from tango_jax.runtime.checks import differences, folder_to_write, read_json_object, require
from tango_jax.runtime.keys import COUNT, COUNT_OR_NONE, MAX_SAMPLES, SAMPLED_TEMPERATURE, SEED, SHARE_ABOVE_ZERO, Range
from tango_jax.sampling.checkpoint_sampler import CheckpointSamplerSettings, template_of
from tango_jax.text.templates import load_template
from tango_jax.weights.source import kind_of
from tango_jax.weights.workdir import identify_weights, prompting_of

VERIFIER_TOKENS = 4096  # of a prompt, and of a response, as published
_SAMPLED = SAMPLED_TEMPERATURE._replace(
    why=": the greedy attempt is made without being asked for, and one vote is greedy"
)
_JUDGED_SETS = ("processbench", *GROUPS["processbench"], *SYNTHETIC_STEPS)  # that need no solver
MAY_CHANGE = ("out", "rows", "decode_tensor")  # settings that a resumed evaluation may change


def _option(default: Any, help: str, within: Range | None = None, names: Sequence[str] = (), **argument) -> Any:
    """A field of Settings that is an option of the command line: its range, other names, and what argparse takes."""
    metadata = {"help": help, "within": within, "names": names, "argument": argument}
    return dataclasses.field(default=default, metadata=metadata)


def _tokens(what: str, default: int) -> Any:
    return _option(0, f"tokens of {what}; 0: {default}, or as in the run", COUNT_OR_NONE)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of one evaluation: the options of the command, in the order of its help."""

    checkpoint: str | None = _option(None, "what solves the problems, and judges if there is no --verifier")
    verifier: str | None = _option(None, "what judges: every solution of --checkpoint, and the sets made for it")
    sets: tuple[str, ...] = _option((), "names, separated by commas; NAME:SOURCE takes other rows", required=True)
    out: Path = _option("runs/eval", "folder of the results", names=("--workdir",))
    samples: int = _option(0, "sampled solutions of each problem; 0: greedy alone", Range(0, MAX_SAMPLES))
    temperature: float = _option(1.0, "of the sampled solutions", _SAMPLED)
    top_p: float = _option(1.0, "nucleus sampling; 1 (default): every token", SHARE_ABOVE_ZERO)
    skip_greedy: bool = _option(False, "sampled solutions alone")
    votes: int = _option(1, "verifications of a solution; 1: greedy, more: sampled", Range(1, MAX_SAMPLES))
    verifier_temperature: float = _option(1.0, "of several votes", _SAMPLED)
    problems: int = _option(0, "of each set, drawn by --seed; 0: all (synthetic: 200)", COUNT_OR_NONE)
    grader: str | None = _option(None, "a function (problem, answer) -> bool that decides what is right, as "
                                 "task.grader does in training (default: answers are compared)",
                                 metavar="FILE.py:NAME")  # fmt: skip
    max_prompt: int = _tokens("the generator", 2048)
    max_new: int = _tokens("a response", 2048)
    template: str | None = _option(None, "name or file (default: math, or as in the run)")
    verifier_max_prompt: int = _tokens("the verifier", VERIFIER_TOKENS)
    verifier_max_new: int = _tokens("a response", VERIFIER_TOKENS)
    verifier_template: str | None = _option(None, "name or file (default: math, or as in the run)")
    use_chat: bool = _option(False, "prompts in the checkpoint's chat template (default: as in the run)")
    dtype: str = _option("float32", "default: %(default)s", choices=("float32", "bfloat16"))
    seed: int = _option(0, "of the problems drawn and of the sampling; default: 0", SEED)
    shard: int = _option(64, "problems done at once: what an interruption costs", COUNT)
    rows: int = _option(64, "responses decoded at once; limited by memory", COUNT)
    decode_tensor: int = _option(1, "devices of a process that share the weights", COUNT)

    @property
    def judge(self) -> str:
        """The model that judges the sets that need no solver."""
        return self.verifier or self.checkpoint

    def sampler(self, role: str) -> CheckpointSamplerSettings:
        """What the sampler of a role is opened with."""
        own = {
            "generator": CheckpointSamplerSettings(self.template, self.max_prompt, self.max_new),
            "verifier": CheckpointSamplerSettings(
                self.verifier_template, self.verifier_max_prompt, self.verifier_max_new,
                default_tokens=VERIFIER_TOKENS, max_new_flag="verifier_max_new",
            ),
        }[role]  # fmt: skip
        return dataclasses.replace(
            own, use_chat=self.use_chat, dtype=self.dtype, rows=self.rows, decode_tensor=self.decode_tensor
        )


def parse_settings(doc: str, argv: Sequence[str] | None) -> Settings:
    """Settings from arguments; --help shows `doc` and ends the process.

    Raises:
        ValueError: unknown arguments or values that cannot be; names the value, the limit and the fix.
    """
    fields = vars(_parser(doc).parse_args(argv))
    fields["sets"] = tuple(dict.fromkeys(part.strip() for part in fields["sets"].split(",") if part.strip()))
    fields["out"] = folder_to_write("--out", fields["out"])
    settings = Settings(**fields)
    check(settings)
    return settings


def check(settings: Settings) -> None:
    """Raise ValueError for the first invalid setting."""
    require(bool(settings.sets), "--sets is empty: name at least one")
    require(bool(settings.judge), "no model is named: --checkpoint solves, --verifier judges; give one or both")
    for name in (settings.checkpoint, settings.verifier):
        if name is not None:
            kind_of(name)
    fields = dataclasses.fields(Settings)
    check_options(settings, {one.name: within for one in fields if (within := one.metadata["within"])})
    require(settings.samples > 0 or not settings.skip_greedy,
            "--skip_greedy leaves nothing to write: set --samples to at least 1")


def models_of(settings: Settings) -> dict[str, str]:
    """The model of each role that has work. The others are not opened: they need neither weights nor a template."""
    is_judged = [name.partition(":")[0] in _JUDGED_SETS for name in settings.sets]
    models = {} if all(is_judged) else {"generator": settings.checkpoint}
    if any(is_judged) or settings.verifier is not None:
        models["verifier"] = settings.judge
    return models


def check_settings(settings: Settings) -> None:
    """Check that the settings of an earlier attempt in the output folder, if any, are the same; write nothing.

    The first process does the check, but all processes must call this function.

    Raises:
        ValueError: the folder holds another evaluation (the message names the differences) or its settings are missing.
    """
    hosts.in_first(lambda: _compare(settings.out / "settings.json", _comparable(settings)))


def save_settings(settings: Settings) -> None:
    """Write the settings into the output folder; if they are there, compare them. The first process does; all must call
    it.

    Raises:
        ValueError: the settings cannot be written, or a checkpoint has changed since they were.
    """
    path = settings.out / "settings.json"

    def save() -> None:
        found = _comparable(settings)
        if path.exists():
            _compare(path, found)
        else:
            write_json_atomic(path, found)

    hosts.in_first(save)


def _compare(path: Path, new: dict) -> None:
    if not path.exists():
        require(not (path.parent / "parts").exists(),
                f"{path} is missing, and without it nobody can tell whether {path.parent / 'parts'} was made with "
                "these settings: put back a copy, or choose another --out")
        return
    if changed := differences(read_json_object(path, "choose another --out"), new):
        raise ValueError(f"{path.parent} holds another evaluation ({'; '.join(changed[:5])}): go on with the same "
                         "settings, or choose another --out")


def _comparable(settings: Settings) -> dict:
    fields = {name: value for name, value in dataclasses.asdict(settings).items() if name not in MAY_CHANGE}
    fields["sets"] = list(settings.sets)
    # A run that goes on training between two attempts is another model, as are other weights in the same place, and an
    # edited template is another prompt.
    for role, name in models_of(settings).items():
        step, fields[f"{role}_weights_digest"] = identify_weights(name, role)
        if step is not None:
            fields["checkpoint_step" if role == "generator" else "verifier_step"] = step
        template = template_of(prompting_of(name, role), settings.sampler(role))
        fields[f"{role}_template_digest"] = digest(load_template(role, template))
    return fields


def _parser(doc: str) -> Parser:
    parser = Parser("evaluate", doc)
    for one in dataclasses.fields(Settings):
        if one.type is bool:
            parser.add_flag(f"--{one.name}", one.metadata["help"])
        else:
            kind = one.type if one.type in (int, float) else str
            parser.add_argument(f"--{one.name}", *one.metadata["names"], type=kind, default=one.default,
                                help=one.metadata["help"], **one.metadata["argument"])  # fmt: skip
    return parser
