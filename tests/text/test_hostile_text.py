"""Whatever a model writes goes its way to the end: into a verifier's prompt, the records, the dump, the report and the
transcripts. Nothing of it raises, and a prompt is never longer than its limit."""

import json
import types

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.letters import LETTERS
from support.small_tokenizers import byte_level
from tango_jax.config import default_config
from tango_jax.method.texts import build_prompts, make_solution, read_responses, with_parents
from tango_jax.records import Lesson, Memory, Problem, Responses, Rewards, Rollout, StepRewards, TurnResult
from tango_jax.rl.schedule import Place
from tango_jax.tasks.last_letter import gold_steps, tokenizer_model
from tango_jax.tasks.prompt_lengths import make_num_tokens
from tango_jax.text.hf_tokenizer import make_tokenizer
from tango_jax.text.prompts import JUDGE, SECOND_JUDGEMENT, SECOND_TRY, SOLVE, prompt_ids, verification_of
from tango_jax.text.templates import MANY_STEPS, TEMPLATES, verifier_prompt
from tango_jax.text.tokenizer import Tokenizer, load_sentencepiece
from tango_jax.tracking.results import transcripts
from tango_jax.tracking.rollout_rows import turn_rows
from tango_jax.tracking.scores import generator_scores, verifier_scores
from tango_jax.viewer.pack import chunks_of, columns_of, encode_json, pack_rollout

PROBLEM = Problem("p/1", "cat#1 dog#2", "tg", size=2)
TASK = types.SimpleNamespace(min_steps=2, gold_steps=gold_steps)
SIZES = settings(deadline=None, max_examples=30, derandomize=True)

MARKS = [
    "<step>", "</step>", "<step></step>", "<think>", "</think>", "<answer>", "</answer>", "\\boxed{", "}", "{", "\\",
    "<step_verification>", "</step_verification>", "<final_verification>", "</final_verification>",
    "\\boxed{CORRECT}", "\\boxed{INCORRECT}", "\\box{correct}.", "{problem}", "{solution}", "{num_steps}", "{x}", "\\1",
    "<|im_end|>", "<|im_start|>", "```", "|", "\x00", "\x1b[2J", "\r\n", "\u2028", "\ufeff", "\U0001f642", "e\u0301",
    "#1 ends in t", "#99999999999999999999 ends in a", "\u0663", " ", "", "a" * 300, "</script><!--",
]
fragments = st.one_of(st.sampled_from(MARKS), st.text(st.characters(exclude_categories=["Cs"]), max_size=6))
texts = st.lists(fragments, max_size=30).map("".join)
step_counts = st.one_of(st.integers(0, 12), st.sampled_from([9, 10, 99, 100, 101, 999, 1000, 5000, 10**9]))


def hf_tokenizer() -> Tokenizer:
    backend = byte_level("qwen2")
    return make_tokenizer(backend, 700, bos_ids=(), stop_ids=(backend.token_to_id("<|im_end|>"),))


TOKENIZERS = {
    "letters": LETTERS,
    "sentencepiece": load_sentencepiece(tokenizer_model(default_config().task)),
    "byte level": hf_tokenizer(),
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request) -> Tokenizer:
    return TOKENIZERS[request.param]


@pytest.mark.parametrize("name", ["math", "last_letter"])
@pytest.mark.parametrize("num_steps", [1, 99, 100, 1000, 10**7])
def test_a_problem_at_the_limit_has_a_prompt_for_any_number_of_steps(tokenizer, name, num_steps):
    """A hundred steps take a token more than the 99 that problems are counted with."""
    template = TEMPLATES["verifier", name]
    limit = len(verifier_prompt(template, tokenizer, PROBLEM, "", MANY_STEPS, 1 << 30)[0])
    text = "<step>ab</step>" * min(num_steps, 300)
    for room in (0, 1, 5, 40):
        ids, is_shortened = verifier_prompt(template, tokenizer, PROBLEM, text, num_steps, limit + room)
        assert len(ids) <= limit + room and (is_shortened or num_steps == 1)
    wide, is_shortened = verifier_prompt(template, tokenizer, PROBLEM, text[:50], num_steps, limit + 100)
    assert not is_shortened and str(num_steps) in tokenizer_text(tokenizer, wide)


def tokenizer_text(tokenizer, ids) -> str:
    return LETTERS.read(ids) if tokenizer is LETTERS else tokenizer.decode(ids)


@SIZES
@given(question=texts, solution=texts, num_steps=step_counts, room=st.integers(0, 60))
@example(question="q", solution="", num_steps=100, room=0)
@example(question="q", solution="\U0001f642" * 200, num_steps=10**9, room=3)
def test_no_text_makes_a_prompt_fail_or_too_long(question, solution, num_steps, room):
    problem = Problem("p", question, "")
    for tokenizer in TOKENIZERS.values():
        template = TEMPLATES["verifier", "math"]
        limit = len(verifier_prompt(template, tokenizer, problem, "", MANY_STEPS, 1 << 30)[0]) + room
        ids, is_shortened = verifier_prompt(template, tokenizer, problem, solution, num_steps, limit)
        assert len(ids) <= limit
        whole, _ = verifier_prompt(template, tokenizer, problem, solution, num_steps, 1 << 30)
        assert is_shortened == (len(whole) > limit) and (is_shortened or ids == whole)


@SIZES
@given(question=texts, solution=texts, said=texts, num_steps=step_counts, room=st.integers(0, 60))
@example(question="{text}", solution="{problem}" * 40, said="{text}" * 40, num_steps=1, room=0)
@example(question="q", solution="\U0001f642" * 200, said="", num_steps=10**9, room=3)
def test_no_text_makes_a_prompt_about_a_verification_fail_or_too_long(question, solution, said, num_steps, room):
    """Nor one of which the problem alone fits."""
    problem = Problem("p", question, "")
    judged = verification_of(problem, solution, said, min(num_steps, 1000))
    bare = verification_of(problem, "", "", MANY_STEPS)
    for tokenizer in TOKENIZERS.values():
        for prompt, least in ((SECOND_TRY, (SOLVE, problem)), (SECOND_JUDGEMENT, (SECOND_JUDGEMENT, bare))):
            template = TEMPLATES[prompt.role, "math"]
            limit = room + len(prompt_ids(least[0], template, tokenizer, least[1], 1 << 30)[0])
            ids, is_cut = prompt_ids(prompt, template, tokenizer, judged, limit)
            whole, _ = prompt_ids(prompt, template, tokenizer, judged, 1 << 30)
            assert len(ids) <= limit and is_cut == (len(whole) > limit) and (is_cut or ids == whole)


@SIZES
@given(question=texts, solution=texts, num_steps=step_counts, limit=st.integers(150, 2500))
def test_what_the_filter_accepts_has_a_prompt(question, solution, num_steps, limit):
    config = default_config()
    problem = Problem("p", question, "")
    for tokenizer in TOKENIZERS.values():
        config.generator.max_prompt = config.verifier.max_prompt = limit
        num_tokens_fn = make_num_tokens(config, {"generator": tokenizer, "verifier": tokenizer})
        if num_tokens_fn(problem) <= limit:
            ids, _ = verifier_prompt(TEMPLATES["verifier", "math"], tokenizer, problem, solution, num_steps, limit)
            assert len(ids) <= limit


def token_ids(data, tokenizer) -> np.ndarray:
    """What a model might sample: any ids, or those of a hostile text; never none, since the sampler emits one."""
    size = tokenizer.vocab_size
    ids = data.draw(st.one_of(st.lists(st.integers(0, size - 1), max_size=40),
                              texts.map(lambda text: tokenizer.encode_response(text)[:200])))
    return np.array(ids or [tokenizer.stop_ids[0]], np.int32)


def rollout_of(tokens: list[np.ndarray]) -> Rollout:
    logps = tuple(np.zeros(len(ids), np.float32) for ids in tokens)
    return Rollout(tuple(tokens), logps, np.zeros(len(tokens), bool), 1, len(tokens))


@pytest.mark.parametrize("name", ["sentencepiece", "byte level"])
@settings(SIZES, max_examples=20)
@given(data=st.data())
def test_any_tokens_reach_the_report_and_the_transcripts(name, data):
    tokenizer, M, T = TOKENIZERS[name], 2, 200
    solutions = []
    for _ in range(M):
        text, ends = tokenizer.decode_with_ends(token_ids(data, tokenizer))
        solutions.append(make_solution(TASK, PROBLEM, text, ends, data.draw(st.booleans())))
        assert all(0 <= end < len(ends) for end in solutions[-1].step_ends)
    config = types.SimpleNamespace(max_prompt=90 if name == "sentencepiece" else 900)
    template = TEMPLATES["verifier", "last_letter" if name == "sentencepiece" else "math"]
    policy = types.SimpleNamespace(template=template, tokenizer=tokenizer, config=config)
    prompts, is_cut = build_prompts(policy, JUDGE, solutions)
    assert max(map(len, prompts)) <= config.max_prompt and len(is_cut) == M
    rollout = rollout_of([token_ids(data, tokenizer) for _ in "ab"])
    verifications = with_parents(read_responses(JUDGE, TASK, tokenizer, solutions, rollout), solutions)
    generator_scores(solutions, [False] * M)
    verifier_scores(solutions, verifications)

    labels = [item.judgements if item.is_aligned else None for item in verifications]
    zeros_BT = np.zeros((M, T + 1), np.float32)
    steps = StepRewards(zeros_BT, zeros_BT > 0, [one and tuple(map(float, one)) for one in labels])
    run = default_config()
    sampled = [
        Responses(role, parents, [], size, types.SimpleNamespace(
            logps=[np.zeros(len(record.token_ends)) for record in records]), records, {}, role)
        for role, parents, size, records in (("generator", [PROBLEM], M, solutions),
                                             ("verifier", solutions, 1, verifications))
    ]
    terms = {"outcome": (0.5, zeros_BT), "steps": (0.5, zeros_BT)}
    lesson = Lesson(sampled[0], Rewards(np.zeros(M, np.float32), {}), terms, step_rewards=[steps])
    result = TurnResult({}, {}, sampled, lesson, zeros_BT, Memory())
    lines = [json.dumps(row, allow_nan=False) for row in turn_rows(run, Place(0, "generator", "generator", 0), result)]
    assert not any("\n" in line for line in lines)
    packed = [pack_rollout(0, json.loads(line)) for line in lines]
    assert list(chunks_of(packed)) and encode_json(columns_of(packed))
    assert transcripts(solutions, verifications, M).encode()
