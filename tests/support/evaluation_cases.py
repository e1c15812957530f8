"""Samplers whose responses are written by hand, and evaluations that use them."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from support.paths import ROWS
from support.small_tokenizers import byte_level
from support.tiny_checkpoints import MODEL
from tango_jax.evaluation import command, judging, responses
from tango_jax.evaluation.settings import parse_settings
from tango_jax.evaluation.shards import GREEDY
from tango_jax.records import Rollout
from tango_jax.runtime.console import Console
from tango_jax.runtime.keys import MAX_SAMPLES
from tango_jax.sampling.checkpoint_sampler import CheckpointSampler, open_checkpoint_sampler
from tango_jax.sampling.given_text import make_logits_fn
from tango_jax.text.hf_tokenizer import make_tokenizer

FILES = {  # rows of every set to solve
    "math500": "math500.jsonl", "aime24": "aime_capitals.jsonl", "aime25": "aime.jsonl", "amc23": "amc23.jsonl",
    "olympiadbench": "olympiadbench.jsonl", "gsm8k": "gsm8k.jsonl", "bgqa": "bgqa.jsonl", "cruxeval": "cruxeval.jsonl",
    "strategyqa": "strategyqa.json", "tablebench": "tablebench.jsonl",
}
SILENT = Console(enabled=False)
PROMPT = "{problem}\n"
CLAIM = "{problem}\n{solution}\n{num_steps}\n"


def small_tokenizer():
    backend = byte_level("smollm")
    return make_tokenizer(backend, backend.get_vocab_size(), (), (backend.token_to_id("<|im_end|>"),))


def sets_flag(files=FILES) -> str:
    return ",".join(f"{name}:{ROWS / file}" for name, file in files.items())


def tagged(answer, steps=3) -> str:
    return f"<think>{'<step>some work</step>' * steps}</think>\n<answer>\\boxed{{{answer}}}</answer>"


def verification(verdict: str, *judgements: bool) -> str:
    blocks = "".join(f"<step>\\boxed{{{'CORRECT' if mark else 'INCORRECT'}}}</step>" for mark in judgements)
    return (f"<step_verification>{blocks}</step_verification>"
            f"<final_verification>\\boxed{{{verdict}}}</final_verification>")


def settings_of(out, *flags, sets, checkpoint="a/b"):
    """As the command line gives them; the names of models need not exist where samplers are scripted."""
    named = [f"--checkpoint={checkpoint}"] * bool(checkpoint)
    return parse_settings("", [*named, f"--sets={sets}", f"--out={out}", *flags])


def undecided(rows, chosen):
    """Logits by which every mark has probability 1/2."""
    return [np.zeros((len(row), len(chosen)), np.float32) for row in rows]


def scripted(tokenizer, text_fn, template=PROMPT, max_prompt=100_000, calls=None, rows=64,
             stops=False, logits_fn=undecided) -> CheckpointSampler:
    """A sampler that returns text_fn(row number, prompt text, is greedy); a text that is None is cut off. `logits_fn`
    is in place of its model's."""

    def sample(weights, request):
        prompts, group_size = request.prompts, request.group_size
        assert len(request.row_numbers) == len(prompts) * group_size <= rows * len(prompts)
        if calls is not None:
            calls.append((len(prompts), group_size, request.temperature))
        texts = [text_fn(int(number), tokenizer.decode(prompts[b // group_size]), request.temperature == 0.0)
                 for b, number in enumerate(request.row_numbers)]
        ids = tuple(np.array(tokenizer.encode_response(text or "<think>")) for text in texts)
        return Rollout(ids, ids, np.array([text is None for text in texts]), 1, len(texts))

    source = SimpleNamespace(name="a model", tokenizer=tokenizer, load_params=lambda shardings: {}, model_config=MODEL)
    sampler = SimpleNamespace(layout=lambda params: params, sample=sample, logits_fn=logits_fn,
                              config=SimpleNamespace(cache_buckets=(100_000,)))
    return CheckpointSampler(source, sampler, None, template, max_prompt, 3, rows, stops=stops)


class ScriptedDriver:
    """In place of the decode loop: row numbers decide between verifications, and calls are counted."""

    def __init__(self, tokenizer, *texts):
        self.tokenizer, self.texts, self.calls = tokenizer, texts, 0

    def sample(self, weights, request):
        self.calls += len(request.row_numbers)
        chosen = [self.texts[int(number) % len(self.texts)] for number in request.row_numbers]
        tokens = tuple(np.array(self.tokenizer.encode_response(text)) for text in chosen)
        return Rollout(tokens, tokens, np.zeros(len(chosen), bool), 1, len(chosen))


def scripted_verifier(monkeypatch, *texts) -> ScriptedDriver:
    """The verifiers of `judge_rows` write these, with the weights of their checkpoints."""
    driver = ScriptedDriver(small_tokenizer(), *texts)

    def open_scripted(role, name, settings):
        opened = open_checkpoint_sampler(role, name, settings)
        return dataclasses.replace(opened, sampler=dataclasses.replace(opened.sampler, driver=driver))

    monkeypatch.setattr(judging, "open_checkpoint_sampler", open_scripted)
    return driver


def solver(tokenizer, text_fn, **settings) -> CheckpointSampler:
    """text_fn(number of the problem, sample, prompt)."""
    return scripted(
        tokenizer,
        lambda row, prompt, is_greedy: text_fn(row // MAX_SAMPLES, GREEDY if is_greedy else row % MAX_SAMPLES, prompt),
        **settings,
    )


def judge(tokenizer, text_fn, samples=0, votes=1, **settings) -> CheckpointSampler:
    """text_fn(number of the problem, sample, vote) of an evaluation with so many samples, greedy ones besides."""

    def text(row, prompt, is_greedy):
        claim, vote = divmod(row, votes)
        number, place = divmod(claim, samples + 2)
        return text_fn(number, place - 1, vote)

    return scripted(tokenizer, text, CLAIM, **settings)


def evaluate(monkeypatch, settings, generator=None, verifier=None, console=SILENT) -> dict:
    """Results by set, with the given samplers."""
    samplers = {"generator": generator, "verifier": verifier}
    monkeypatch.setattr(command, "open_checkpoint_sampler", lambda role, name, settings: samplers[role])
    monkeypatch.setattr(command, "open_verifier", lambda name, settings, is_scored: samplers["verifier"])
    for module in (judging, responses):
        monkeypatch.setattr(module, "make_logits_fn", lambda sampler: (
            sampler.sampler.logits_fn if isinstance(sampler.sampler, SimpleNamespace) else make_logits_fn(sampler)))
    return {result.name: result for result in command.evaluate_checkpoint(settings, console)}


def figures(result) -> dict:
    """(name, k) -> value."""
    return {(metric.name, metric.k): metric.estimate.value for metric in result.metrics}


def files_of(folder: Path) -> dict[str, bytes]:
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
