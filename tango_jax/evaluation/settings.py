"""The settings of `python -m tango_jax.evaluate`, and the copy of them that a resumed evaluation must match."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tango_jax.cli.arguments import Parser
from tango_jax.cli.ranges import check_options
from tango_jax.evaluation.responses import Pass
from tango_jax.evaluation.sets import GROUPS, SYNTHETIC_STEPS
from tango_jax.evaluation.shards import GREEDY, digest
from tango_jax.runtime import hosts
from tango_jax.runtime.atomic import write_json_atomic
from tango_jax.runtime.checks import differences, folder_to_write, read_json_object, require
from tango_jax.runtime.keys import COUNT, COUNT_OR_NONE, MAX_SAMPLES, SAMPLED_TEMPERATURE, SEED, SHARE_ABOVE_ZERO, Range
from tango_jax.sampling.checkpoint_sampler import CheckpointSamplerSettings, template_of, uses_chat
from tango_jax.text.templates import load_template
from tango_jax.weights.source import kind_of
from tango_jax.weights.workdir import identify_weights, prompting_of

VERIFIER_TOKENS = 4096  # of a prompt, and of a response, as published
_SAMPLED = SAMPLED_TEMPERATURE._replace(
    why=": greedy solutions are made anyway, and one vote is greedy"
)
_JUDGED_SETS = ("processbench", *GROUPS["processbench"], *SYNTHETIC_STEPS)  # that need no solver
MAY_CHANGE = ("out", "rows", "decode_tensor")  # settings that a resumed evaluation may change


def _option(default: Any, help: str, within: Range | None = None, names: Sequence[str] = (), **argument) -> Any:
    metadata = {"help": help, "within": within, "names": names, "argument": argument}
    return dataclasses.field(default=default, metadata=metadata)


def _tokens(what: str, default: int) -> Any:
    return _option(0, f"tokens of {what}; 0: {default}, or as in the run", COUNT_OR_NONE)


@dataclasses.dataclass(frozen=True)
class Settings:
    checkpoint: str | None = _option(None, "solves the problems, and judges if there is no --verifier")
    verifier: str | None = _option(None, "judges every solution of --checkpoint, and the sets to judge")
    sets: tuple[str, ...] = _option((), "names, separated by commas; NAME:SOURCE reads other rows", required=True)
    out: Path = _option("runs/eval", "folder of the results", names=("--workdir",))
    samples: int = _option(0, "sampled solutions of each problem; 0: greedy alone", Range(0, MAX_SAMPLES))
    temperature: float = _option(1.0, "of the sampled solutions", _SAMPLED)
    top_p: float = _option(1.0, "nucleus sampling; 1 (default): every token", SHARE_ABOVE_ZERO)
    skip_greedy: bool = _option(False, "sampled solutions alone")
    scored: bool = _option(False, "the verifier writes nothing: its marks are read in one pass, as judge --scored does "
                           "(default: as in the run)")
    votes: int = _option(1, "verifications of a solution; 1: greedy, more: sampled", Range(1, MAX_SAMPLES))
    verifier_temperature: float = _option(1.0, "of several votes", _SAMPLED)
    problems: int = _option(0, "problems of each set, drawn by --seed; 0: all (synthetic: 200)", COUNT_OR_NONE)
    grader: str | None = _option(None, "a function (problem, answer) -> bool that decides what is right, as "
                                 "task.grader does in training (default: answers are compared)",
                                 metavar="FILE.py:NAME")
    max_prompt: int = _tokens("the generator", 2048)
    max_new: int = _tokens("a response", 2048)
    template: str | None = _option(None, "name or file (default: math, or as in the run)")
    verifier_max_prompt: int = _tokens("the verifier", VERIFIER_TOKENS)
    verifier_max_new: int = _tokens("a response", VERIFIER_TOKENS)
    verifier_template: str | None = _option(None, "name or file (default: math, or as in the run)")
    use_chat: bool = _option(False, "prompts of --checkpoint in its chat template (default: as in the run)")
    verifier_use_chat: bool = _option(False, "the same for --verifier")
    dtype: str = _option("float32", "default: %(default)s", choices=("float32", "bfloat16"))
    seed: int = _option(0, "of the problems drawn and of the sampling; default: 0", SEED)
    shard: int = _option(64, "problems done at once; an interruption costs up to one shard", COUNT)
    rows: int = _option(64, "responses decoded at once; limited by memory", COUNT)
    decode_tensor: int = _option(1, "devices of a process that share the weights", COUNT)

    @property
    def judge(self) -> str:
        return self.verifier or self.checkpoint

    @property
    def passes(self) -> tuple[Pass, ...]:
        greedy, sampled = Pass((GREEDY,), 0.0, 1.0), Pass(tuple(range(self.samples)), self.temperature, self.top_p)
        return (greedy,) * (not self.skip_greedy) + (sampled,) * bool(self.samples)

    def sampler(self, role: str) -> CheckpointSamplerSettings:
        prefix, tokens = {"generator": ("", 2048), "verifier": ("verifier_", VERIFIER_TOKENS)}[role]
        own = {name: getattr(self, f"{prefix}{name}") for name in ("template", "max_prompt", "max_new")}
        shared = {name: getattr(self, name) for name in ("dtype", "rows", "decode_tensor")}
        return CheckpointSamplerSettings(**own, **shared, use_chat=uses_chat(self, role), default_tokens=tokens,
                                         max_new_flag=f"{prefix}max_new")


def parse_settings(doc: str, argv: Sequence[str] | None) -> Settings:
    """Settings from arguments. --help shows `doc` and ends the process. Raises ValueError for wrong settings."""
    fields = vars(_parser(doc).parse_args(argv))
    fields["sets"] = tuple(dict.fromkeys(part.strip() for part in fields["sets"].split(",") if part.strip()))
    fields["out"] = folder_to_write("--out", fields["out"])
    settings = Settings(**fields)
    check(settings)
    return settings


def check(settings: Settings) -> None:
    require(bool(settings.sets), "--sets is empty: name at least one")
    require(bool(settings.judge), "no model is named: --checkpoint solves, --verifier judges; give one or both")
    for name in (settings.checkpoint, settings.verifier):
        if name is not None:
            kind_of(name)
    fields = dataclasses.fields(Settings)
    check_options(settings, {one.name: within for one in fields if (within := one.metadata["within"])})
    require(settings.samples > 0 or not settings.skip_greedy,
            "--skip_greedy leaves nothing to write: set --samples to at least 1")
    for flag, is_set in ((f"--votes={settings.votes}", settings.votes > 1), ("--scored", settings.scored)):
        require(not is_set or "verifier" in models_of(settings), f"{flag} is of a verifier, and no solution is judged: "
                f"name a --verifier, or leave {flag.partition('=')[0]} out")
    uses_chat(settings, "verifier")


def models_of(settings: Settings) -> dict[str, str]:
    is_judged = [name.partition(":")[0] in _JUDGED_SETS for name in settings.sets]
    models = {} if all(is_judged) else {"generator": settings.checkpoint}
    if any(is_judged) or settings.verifier is not None:
        models["verifier"] = settings.judge
    return models


def _parser(doc: str) -> Parser:
    parser = Parser("evaluate", doc)
    for one in dataclasses.fields(Settings):
        if one.type is bool:
            parser.add_flag(f"--{one.name}", one.metadata["help"])
        else:
            kind = one.type if one.type in (int, float) else str
            parser.add_argument(f"--{one.name}", *one.metadata["names"], type=kind, default=one.default,
                                help=one.metadata["help"], **one.metadata["argument"])
    return parser


def check_settings(settings: Settings) -> None:
    """Raises ValueError where the output folder holds another evaluation, or its settings are missing. Writes nothing.

    The first process checks; all must call this.
    """
    hosts.in_first(lambda: _compare(settings.out / "settings.json", _comparable(settings)))


def save_settings(settings: Settings) -> None:
    """Write the settings into the output folder, unless they are there. See `check_settings`."""
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
    promptings = {role: prompting_of(name, role) for role, name in models_of(settings).items()}
    fields["scored"] |= any(own is not None and own.is_scored for own in promptings.values())
    # Evaluations begun before there was a choice go on. One --use_chat was of both models then.
    if not fields["scored"]:
        del fields["scored"]
    if not settings.verifier_use_chat and not (settings.verifier and settings.use_chat):
        del fields["verifier_use_chat"]
    # Longer training, other weights in the same place or an edited template make another model.
    for role, name in models_of(settings).items():
        step, fields[f"{role}_weights_digest"] = identify_weights(name, role)
        if step is not None:
            fields["checkpoint_step" if role == "generator" else "verifier_step"] = step
        template = template_of(promptings[role], settings.sampler(role))
        fields[f"{role}_template_digest"] = digest(load_template(role, template))
    return fields
