"""The argument parser of every command: argparse with the command's docstring as its help.

Options are written in full, as `--x=value` or `--x value`, with - or _ between words; switches take true or false.
"""

import argparse
import difflib
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import IO, NoReturn

from tango_jax.cli.config_file import shipped_configs
from tango_jax.cli.key_list import ListKeys
from tango_jax.config import default_config, flatten
from tango_jax.method.arms import ARMS
from tango_jax.runtime.checks import Mistakes, SettingsError, cut
from tango_jax.runtime.failures import drop_broken_output, typed_command

MAX_MESSAGE = 400  # characters; argparse repeats whatever it was given
OVERRIDE = "--config."
USAGE = "--help shows the usage"
CHOICES = ("--config=tiny tries everything in two to three minutes, in half a minute once it is compiled; "
           "--config=last_letter is the quickstart; --config=own_problems --model=MODEL --problems=FILE takes your "
           "model and problems")
COMMON_KEYS = {
    "arm=NAME": f"what is trained and rewarded: {', '.join(ARMS)}, or FILE.py:name",
    "seed=1": "seed of everything random in a run",
    "ROLE.checkpoint=MODEL": "what a role starts from: a folder, hub id, .gguf file or workdir",
    "ROLE.max_response=512": "tokens that a role may write; ROLE.max_prompt: that it may read",
    "ROLE.optimizer.lr=1e-6": "learning rate; stage 1 has its own, ROLE.sft.optimizer.lr",
    "ROLE.loss.algorithm=rloo": "grpo, rloo, reinforce_pp, or FILE.py:name",
    "ROLE.sft.steps=0": "updates of stage 1; 0: no stage 1",
    "ROLE.row_buckets=(8,16)": "responses decoded at once; fewer need less memory",
    "ROLE.rows_per_micro_batch=2": "rows of a forward and backward pass; fewer need less memory",
    "rl.generator_steps=100": "length of the run, in turns of the generator",
    "rl.prompts_per_step=64": "problems of a turn; rl.samples_per_prompt: solutions of each",
    "task.train=FILE": "problems of task.name=math (own_problems sets it); task.test: problems to evaluate on",
    "eval.every=20": "generator steps between evaluations; also checkpoint.every and rollouts.every, in turns",
    "loggers.wandb=PROJECT": "also log to Weights & Biases; loggers.tensorboard=true: to TensorBoard",
}


class Parser(argparse.ArgumentParser):
    """Every mistake raises a one-line ValueError."""

    def __init__(self, command: str, doc: str, usage: str | None = None):
        super().__init__(
            prog=typed_command(command),
            usage=usage,
            description=doc.strip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.takes_config = False
        self._choices = ""

    def add_config(self, choices: str = CHOICES) -> None:
        """`choices`: the hint where a needed --config is missing; empty: it is optional."""
        self.takes_config, self._choices = True, choices
        self.add_argument("--config", metavar="FILE",
                          help="a Python file, the config.json of a run, or the name of a shipped configuration "
                          f"({', '.join(shipped_configs())}). own_problems needs --model=MODEL and --problems=FILE: "
                          "keyword-only arguments of a file's get_config are options. FILE:arg passes arg to "
                          "get_config")
        width = max(map(len, COMMON_KEYS))
        keys = "\n".join(f"  {OVERRIDE}{key:{width}}  {what}" for key, what in COMMON_KEYS.items())
        self.add_argument_group("overrides", f"{OVERRIDE}key=value replaces a value of the configuration. If a setting "
                                "is given twice, the last\none counts. The commonest keys (ROLE: generator or "
                                f"verifier):\n{keys}\n--keys lists every key with its default and meaning, --keys=loss "
                                "the keys with 'loss' in their\nnames. --print-config of the training commands prints "
                                "every setting of the run.")
        self.add_argument("--keys", nargs="?", const="", metavar="PART", action=ListKeys,
                          help="list the keys of the configuration, or those with PART in their names, and end")

    def add_flag(self, name: str, help: str) -> None:
        self.add_argument(name, nargs="?", const=True, default=False, type=parse_bool, metavar="true|false", help=help)

    def parse_overrides(self, argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
        """Options, and the `key=value` of each --config.key=value or --config.key value, in order.

        `config_arguments` of the options has every other --name=value, for the config file. Raises ValueError.
        """
        spelled, mistakes, rest = self._spelled(argv), Mistakes(), []
        with mistakes.collected():
            options, rest = self.parse_known_args(spelled)
            if self._choices and options.config is None and not vars(options).get("from"):
                raise ValueError(f"no --config is given: {self._choices}; {USAGE}")
        if mistakes.messages:  # an option that is missing may be one that was misspelled
            others = [one for one in self._unknown_options(spelled) if not one.startswith(OVERRIDE)]
            with mistakes.collected():
                # It may be an argument of the config file, which is not known yet.
                nearest = {one: self._nearest(one, []) for one in others}
                self.refuse([one for one, near in nearest.items() if near and not near.startswith(OVERRIDE)])
            mistakes.raise_all()
        overrides: list[str] = []
        named: dict[str, str | None] = {}
        words, waiting = [], ""  # `waiting`: the option that the next word is the value of
        for argument in rest:
            name, separator, value = argument.partition("=")
            if argument.startswith(OVERRIDE):
                overrides.append(argument.removeprefix(OVERRIDE))
                waiting = "" if separator else OVERRIDE
            elif argument.startswith("--") and argument != "--":
                named[_attribute(name)], waiting = value if separator else None, "" if separator else name
            elif waiting == OVERRIDE:
                overrides[-1], waiting = f"{overrides[-1]}={argument}", ""
            elif waiting:
                named[_attribute(waiting)], waiting = argument, ""
            else:
                words.append(argument)
        self.refuse(words)
        options.config_arguments = named
        return options, overrides

    def parse_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Options and positional arguments, in any order. Raises ValueError."""
        spelled, mistakes, options = self._spelled(args), Mistakes(), namespace
        # First: argparse would name a missing required option, not the misspelled one.
        with mistakes.collected():
            self.refuse(self._unknown_options(spelled))
        with mistakes.collected():
            options, rest = self.parse_known_intermixed_args(spelled, namespace)
            self.refuse([argument for argument in rest if argument.startswith("-")] or rest)
        mistakes.raise_all()
        return options

    def refuse(self, unknown: Sequence[str], names: Iterable[str] = ()) -> None:
        """Raise ValueError for unknown arguments; `names` are further known options."""
        messages = []
        for argument in unknown:
            near = self._nearest(argument, [f"--{name}" for name in names])
            meant = f"did you mean {near}? " if near else ""
            messages.append(f"unknown argument {cut(repr(argument))}; {meant}{USAGE}")
        if messages:
            raise SettingsError(messages)

    def refuse_others(self, options: argparse.Namespace, known: Collection[str] = ()) -> None:
        others = {name: value for name, value in options.config_arguments.items() if name not in known}
        self.refuse([f"--{name}" if value is None else f"--{name}={value}" for name, value in others.items()], known)

    def _nearest(self, argument: str, others: list[str]) -> str:
        name = argument.partition("=")[0]
        key = name.lstrip("-")
        if self.takes_config:
            if key in shipped_configs() or key.endswith(".py"):
                return f"--config={key}"
            keys = [*flatten(default_config())]
            near = [key] if key in keys else "." in key and difflib.get_close_matches(key, keys, n=1)
            near = near or [one for one in keys if one.rpartition(".")[2] == _attribute(key)]
            if near:
                return f"{OVERRIDE}{min(near, key=len)}"
        flags = [flag for flag in (*self._option_string_actions, *others) if flag.startswith("--") and flag != "--help"]
        near = difflib.get_close_matches(f"--{key}", flags, n=1)
        return near[0] if near else ""

    def _unknown_options(self, spelled: Sequence[str]) -> list[str]:
        known = {"--", *self._option_string_actions}
        return [one for one in spelled if one.startswith("--") and one.partition("=")[0] not in known]

    def _spelled(self, argv: Sequence[str] | None) -> list[str]:
        """With - and _ as the parser has them, and two dashes for one."""
        known = {_attribute(flag): flag for flag in self._option_string_actions if flag.startswith("--")}
        spelled = []
        for argument in sys.argv[1:] if argv is None else argv:
            name, separator, value = argument.partition("=")
            if name.startswith("-") and (f"-{name}".startswith(OVERRIDE) or _attribute(f"-{name}") in known):
                name = f"-{name}"
            flag = known.get(_attribute(name), name) if name.startswith("--") else name
            spelled.append(f"{flag}{separator}{value}")
        return spelled

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{cut(message, MAX_MESSAGE)}; {USAGE}")

    def print_help(self, file: IO[str] | None = None) -> None:
        super().print_help(file)
        drop_broken_output()  # `--help | head` closes the pipe


def parse_bool(text: str) -> bool:
    """Raises argparse.ArgumentTypeError, which argparse turns into a message."""
    value = {"true": True, "false": False}.get(text.lower())
    if value is None:
        raise argparse.ArgumentTypeError(f"{cut(repr(text))} must be true or false")
    return value


def _attribute(flag: str) -> str:
    """The attribute of an option: --max-new -> max_new."""
    return flag.removeprefix("--").replace("-", "_")
