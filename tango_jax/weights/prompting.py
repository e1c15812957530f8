"""How an exported policy was prompted, in two files next to its weights."""

import json
from pathlib import Path
from typing import NamedTuple

TEMPLATE_FILE = "prompt_template.txt"
PROMPTING_FILE = "prompting.json"


class Example(NamedTuple):
    """The problem that the code of a model card samples for."""

    problem: str = "What is 3 + 4?"
    solution: str = r"<think><step>3 + 4 = 7</step></think><answer>\boxed{7}</answer>"  # for a verifier to judge
    num_steps: int = 1


NO_EXAMPLE = Example("...", "...")  # to be filled in by the reader


class Prompting(NamedTuple):
    role: str  # generator or verifier
    template: str  # with {problem} in it and, for a verifier, {solution} and {num_steps}
    use_chat: bool  # the template's text is the user's turn of the tokenizer's chat template
    max_prompt: int  # tokens
    max_new_tokens: int
    min_steps: int  # fewer step blocks lower the format score
    stop_at_first_error: bool = False  # a verifier ends its judgements at the first INCORRECT
    is_scored: bool = False  # a verifier writes nothing: its marks are read in one pass (text/mark_rows.py)
    chosen_by: str = ""  # the metric, and its problems, by which the run chose these weights; empty: none did

    def snippet(self, example: Example, base: str = "") -> str:
        """Python for the exported folder that samples from the model. `base`: the folder in it with an adapter's base.
        """
        fields = {"{problem}": example.problem, "{num_steps}": str(example.num_steps), "{solution}": example.solution}
        filled = "".join(f'.replace("{name}", {text!r})' for name, text in fields.items() if name in self.template)
        encoded = 'tokenizer(prompt, return_tensors="pt")'
        if self.use_chat:
            encoded = ('tokenizer.apply_chat_template([{"role": "user", "content": prompt}], '
                       'add_generation_prompt=True, return_dict=True, return_tensors="pt")')
        name = base or "."
        opened = f'AutoTokenizer.from_pretrained("{name}"), AutoModelForCausalLM.from_pretrained("{name}")'
        return "\n".join((
            *["from peft import PeftModel"] * bool(base),
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            f"tokenizer, model = {opened}",
            *['model = PeftModel.from_pretrained(model, ".")'] * bool(base),
            f'prompt = open("{TEMPLATE_FILE}", encoding="utf-8").read(){filled}',
            f"inputs = {encoded}",
            f"print(tokenizer.decode(model.generate(**inputs, max_new_tokens={self.max_new_tokens})[0], "
            "skip_special_tokens=True))",
        ))

    def write(self, folder: Path, is_other: bool = False) -> None:
        """`is_other`: of one policy, in the role that it was not exported as."""
        (template, prompting), fields = _files(folder, self.role if is_other else ""), self._asdict()
        # A plain text file, for other programs.
        template.write_text(fields.pop("template"), encoding="utf-8")
        prompting.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def _files(folder: Path, role: str) -> tuple[Path, ...]:
    return tuple(folder / (f"{role}_{name}" if role else name) for name in (TEMPLATE_FILE, PROMPTING_FILE))


def read_prompting(folder: Path, other_role: str = "") -> Prompting | None:
    """The prompting that an export wrote into its folder; None elsewhere. Raises ValueError if a file is damaged or
    missing."""
    text, path = _files(folder, other_role)
    if not path.is_file():
        return None
    try:
        template = text.read_text(encoding="utf-8")
        found = Prompting(template=template, **json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path} and {text.name} beside it cannot be read ({error}): export the run again, or "
                         "remove both and say how the model is prompted (--template, --use_chat)") from error
    numbers = (found.max_prompt, found.max_new_tokens, found.min_steps)
    if not isinstance(found.use_chat, bool) or not all(
            type(number) is int and number >= least for number, least in zip(numbers, (1, 1, 0), strict=True)):
        raise ValueError(f"{path} has use_chat={found.use_chat!r}, max_prompt, max_new_tokens and min_steps={numbers}; "
                         "these are true or false, and whole numbers above 0 (of steps from 0 on): export it again")
    return found
