"""README.md of an exported model: the card that the Hugging Face hub shows."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tango_jax.runtime.failures import typed_command
from tango_jax.runtime.model_text import markdown_cell, markdown_fence
from tango_jax.weights.prompting import NO_EXAMPLE, TEMPLATE_FILE, Example, Prompting

CARD_FILE = "README.md"
HUB = "https://huggingface.co"
_FRONT = re.compile(r"---\r?\n(.*?\n)---", re.DOTALL)
_LICENCE = re.compile(r"^(license(?:_name|_link)?):[ \t]*([^\s].*?)[ \t\r]*$", re.MULTILINE)


class Training(NamedTuple):
    """What a card says of the run."""

    base_model: str | None = None  # a hub id
    licence: Mapping[str, str] = {}  # see `licence_of`
    problems: str = ""  # in words
    datasets: tuple[str, ...] = ()  # hub ids
    command: str = ""


NO_TRAINING = Training()


def licence_of(folder: Path) -> dict[str, str]:
    """license, license_name and license_link of the card in a checkpoint's folder; those that it has."""
    try:
        front = _FRONT.match((folder / CARD_FILE).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return {}
    found = dict(_LICENCE.findall(front[1])) if front else {}
    # A link to a file beside the card leads nowhere from an export.
    return {name: value for name, value in found.items() if name != "license_link" or "://" in value}


def model_card(
    title: str,
    metrics: dict,
    prompting: Prompting | None,
    training: Training = NO_TRAINING,
    trained: str = "",
    evaluated: str = "",
    example: Example = NO_EXAMPLE,
    is_adapter: bool = False,
    base_folder: str = "",
) -> str:
    """`trained` and `evaluated` name the weights ("after turn 8"). `example` is what the card's code samples for.
    `is_adapter`: it is for peft. `base_folder`: the folder beside the card that holds the adapters' base."""
    front = ["---", f"library_name: {'peft' if is_adapter else 'transformers'}", "pipeline_tag: text-generation"]
    front += [f"base_model: {training.base_model}"] if training.base_model else []
    front += [f"{name}: {value}" for name, value in training.licence.items()]
    front += ["datasets:", *(f"- {name}" for name in training.datasets)] if training.datasets else []
    lines = [*front, "tags:", "- tango_jax", "- reinforcement-learning", *["- lora"] * is_adapter, "---", ""]
    weights = f" These are the weights {trained}." if trained else ""
    lines += [f"# {title}", "", f"Made by tango_jax, an implementation of RL Tango (arXiv 2505.15034).{weights}", ""]
    if prompting is not None:
        turn, file = ", as the user's turn of the chat template,", f" (`{TEMPLATE_FILE}`)"
        lines += ["## Use", "", *_use(prompting, example, is_adapter, base_folder), "",
                  f"It was trained on this prompt{turn * prompting.use_chat}{file}:", "",
                  markdown_fence(prompting.template), ""]
    lines += _training(training, base_folder)
    if metrics:
        lines += ["## Evaluation", "", *([f"Of the weights {evaluated}:", ""] if evaluated else [])]
        lines += ["| name | value |", "|---|---|"]
        shown = {name: markdown_cell(value) if value and isinstance(value, str) else value
                 for name, value in metrics.items()}
        lines += [f"| {name} | {value} |" for name, value in shown.items()] + [""]
    return "\n".join(lines)


def _use(prompting: Prompting, example: Example, is_adapter: bool, base_folder: str) -> list[str]:
    if prompting.is_scored:
        return ["As a verifier it does not write: its marks are read in one pass "
                f"(`{typed_command('judge')} --scored`)."]
    if is_adapter and not base_folder:
        return ["In this folder:", "", "```python", "from peft import AutoPeftModelForCausalLM",
                'model = AutoPeftModelForCausalLM.from_pretrained(".")  # and the base that it names', "```"]
    return ["In this folder:", "", "```python", prompting.snippet(example, base_folder), "```"]


def _training(training: Training, base_folder: str) -> list[str]:
    lines, base = [], training.base_model
    if base or base_folder:
        link, unknown = (f"[{base}]({HUB}/{base})", "see its page") if base else (f"`{base_folder}`", "not stated")
        licence = training.licence.get("license_name") or training.licence.get("license", unknown)
        lines += [f"- Base: {link}, licence: {licence}"]
    lines += [f"- Problems: {training.problems}"] if training.problems else []
    lines += ["- Command:", "", markdown_fence(training.command)] if training.command else []
    return ["## Training", "", *lines, ""] if lines else []
