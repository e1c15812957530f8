"""The command line of `python -m tango_jax.evaluate`, checked before any work.

Takes arguments; returns one frozen record. The settings on which a resumed evaluation depends are saved in the output
folder and compared.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from tango_jax.cli.arguments import Parser
from tango_jax.cli.ranges import COUNT, COUNT_OR_NONE, SAMPLED_TEMPERATURE, SEED, SHARE_ABOVE_ZERO, Range, check_options
from tango_jax.data.teacher_rows import MAX_SAMPLES
from tango_jax.evaluation.sets import GROUPS, SYNTHETIC_STEPS
from tango_jax.evaluation.shards import digest
from tango_jax.runtime import hosts
from tango_jax.runtime.atomic import write_json_atomic
from tango_jax.runtime.checks import folder_to_write, require
from tango_jax.sampling.checkpoint_sampler import CheckpointSamplerSettings, template_of
from tango_jax.text.templates import load_template
from tango_jax.weights.source import kind_of
from tango_jax.weights.workdir import identify_weights, prompting_of

VERIFIER_TOKENS = 4096  # of a prompt, and of a response, as published
_SAMPLED = SAMPLED_TEMPERATURE._replace(
    why=": the greedy attempt is made without being asked for, and one vote is greedy"
)
_JUDGED_SETS = ("processbench", *GROUPS["processbench"], *SYNTHETIC_STEPS)  # that need no solver
RANGES = {
    "samples": Range(0, MAX_SAMPLES), "votes": Range(1, MAX_SAMPLES), "temperature": _SAMPLED,
    "verifier_temperature": _SAMPLED, "top_p": SHARE_ABOVE_ZERO, "problems": COUNT_OR_NONE, "seed": SEED,
    "max_prompt": COUNT_OR_NONE, "max_new": COUNT_OR_NONE, "verifier_max_prompt": COUNT_OR_NONE,
    "verifier_max_new": COUNT_OR_NONE, "shard": COUNT, "rows": COUNT, "decode_tensor": COUNT,
}  # fmt: skip
MAY_CHANGE = ("out", "rows", "distributed", "decode_tensor")  # settings that a resumed evaluation may have anew


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of one evaluation."""

    checkpoint: str | None  # what solves problems
    verifier: str | None  # what judges solutions
    sets: tuple[str, ...]  # names, each with ":SOURCE" behind it if it is not the usual one
    out: Path
    samples: int  # per problem, besides the greedy one
    temperature: float
    top_p: float
    skip_greedy: bool
    votes: int  # verifications of each solution
    verifier_temperature: float
    problems: int  # of each set, drawn by `seed`; 0: all
    max_prompt: int
    max_new: int
    verifier_max_prompt: int
    verifier_max_new: int
    grader: str | None  # a user's function, FILE.py:name; None: answers are compared
    template: str | None
    verifier_template: str | None
    use_chat: bool
    dtype: str
    seed: int
    shard: int
    rows: int
    decode_tensor: int
    distributed: bool

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
    check_options(settings, RANGES)
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
    """Write the settings into the output folder, if they are not there. The first process does; all must call it.

    Raises:
        ValueError: the settings cannot be written.
    """
    path = settings.out / "settings.json"
    hosts.in_first(lambda: None if path.exists() else write_json_atomic(path, _comparable(settings)))


def _compare(path: Path, new: dict) -> None:
    try:
        old = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if (path.parent / "parts").exists():
            raise ValueError(f"{path} is missing, and without it nobody can tell whether {path.parent / 'parts'} was "
                             "made with these settings: put back a copy, or choose another --out") from error
        return
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}): choose another --out") from error
    # Earlier versions did not store what the templates say.
    changed = [f"{name}: {old.get(name)} -> {new.get(name)}" for name in sorted(old | new)
               if old.get(name) != new.get(name) and not (name.endswith("_digest") and name not in old)]  # fmt: skip
    if changed:
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
    parser.add_argument("--checkpoint", help="what solves the problems, and judges if there is no --verifier")
    parser.add_argument("--verifier", help="what judges: every solution of --checkpoint, and the sets made for it")
    parser.add_argument("--sets", required=True, help="names, separated by commas; NAME:SOURCE takes other rows")
    parser.add_argument("--out", "--workdir", default="runs/eval", help="folder of the results")
    parser.add_argument("--samples", type=int, default=0, help="sampled solutions of each problem; 0: greedy alone")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the sampled solutions")
    parser.add_argument("--top_p", type=float, default=1.0, help="nucleus sampling; 1 (default): every token")
    parser.add_flag("--skip_greedy", "sampled solutions alone")
    parser.add_argument("--votes", type=int, default=1, help="verifications of a solution; 1: greedy, more: sampled")
    parser.add_argument("--verifier_temperature", type=float, default=1.0, help="of several votes")
    parser.add_argument("--problems", type=int, default=0, help="of each set, drawn by --seed; 0: all (synthetic: 200)")
    parser.add_argument("--grader", metavar="FILE.py:NAME",
                        help="a function (problem, answer) -> bool that decides what is right, as task.grader does in "
                        "training (default: answers are compared)")
    for role, prefix, tokens in (("generator", "", 2048), ("verifier", "verifier_", VERIFIER_TOKENS)):
        default = f"0: {tokens}, or as in the run"
        parser.add_argument(f"--{prefix}max_prompt", type=int, default=0, help=f"tokens of the {role}; {default}")
        parser.add_argument(f"--{prefix}max_new", type=int, default=0, help=f"tokens of a response; {default}")
        parser.add_argument(f"--{prefix}template", help="name or file (default: math, or as in the run)")
    parser.add_flag("--use_chat", "prompts in the checkpoint's chat template (default: as in the run)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the problems drawn and of the sampling; default: 0")
    parser.add_argument("--shard", type=int, default=64, help="problems done at once: what an interruption costs")
    parser.add_argument("--rows", type=int, default=64, help="responses decoded at once; limited by memory")
    parser.add_argument("--decode_tensor", type=int, default=1, help="devices of a process that share the weights")
    parser.add_flag("--distributed", "ask SLURM, Cloud TPU or GKE who else is there")
    return parser
