"""What a policy samples for its own stage 1: keyed by place, stored in parts, read again, and with longer prompts."""

import dataclasses

import pytest

from support.math_cases import math_config, task_of
from support.own_problems import write_problems
from support.policies import policies_of
from support.tiny_checkpoints import write_tiny_folder
from tango_jax.loop import self_sampling
from tango_jax.loop.self_sampling import PartSampler, plainly, with_examples
from tango_jax.method.texts import build_prompts
from tango_jax.runtime.console import Console
from tango_jax.sampling.buckets import SamplerConfig
from tango_jax.tasks.worked_examples import examples_of, read_examples, with_known
from tango_jax.text.prompts import OWN, prompt_ids, solution_of


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(config, the generator's policy, the task, its problems)"""
    folder = tmp_path_factory.mktemp("made")
    model, problems = write_tiny_folder(folder / "model"), write_problems(folder / "sums.jsonl", count=14)
    config = math_config(model, train=str(problems), test="", stage_one="self", min_steps=2)
    config.generator.max_response, config.generator.row_buckets = 8, (8,)
    policy = policies_of(config)["generator"]
    task = task_of(config, policy.tokenizer)
    return config, policy, task, [task.train_problem(index) for index in range(6)]


def sampler_of(made, begun=None, check=lambda: None):
    config, _, task, _ = made
    return PartSampler(config, task, Console(enabled=False), check, lambda: (begun or []).append("begun"))


def test_parts_are_read_again_and_each_part_has_random_numbers_of_its_own(made, tmp_path, monkeypatch):
    monkeypatch.setattr(self_sampling, "PART", 2)
    _, policy, _, problems = made
    asked, weights, loaded = plainly(policy, 0.7), policy.load_params(), []

    def weights_fn():
        loaded.append(1)
        return weights

    whole = sampler_of(made).sample(tmp_path / "a", asked, problems, 2, weights_fn)
    assert [len(own) for own in whole] == [2] * 6 and len({one.text for own in whole for one in own}) == 12
    assert not any(one.is_right for own in whole for one in own)

    class Stopped(Exception):
        pass

    def stop():
        if (tmp_path / "b/a/part_0001.jsonl").exists():
            raise Stopped

    with pytest.raises(Stopped):
        sampler_of(made, check=stop).sample(tmp_path / "b/a", asked, problems, 2, weights_fn)
    (tmp_path / "b/a/part_0000.jsonl").write_text("{")  # damaged: sampled again
    assert sampler_of(made).sample(tmp_path / "b/a", asked, problems, 2, weights_fn) == whole
    parts = [[path.read_bytes() for path in sorted(folder.iterdir())] for folder in (tmp_path / "a", tmp_path / "b/a")]
    assert parts[0] == parts[1] and len(parts[0]) == 3
    loads = len(loaded)
    assert sampler_of(made).sample(tmp_path / "a", asked, problems, 2, weights_fn) == whole and len(loaded) == loads
    with pytest.raises(ValueError, match="part_0000.jsonl holds responses to other prompts: the problems, the templ"):
        sampler_of(made).sample(tmp_path / "a", asked, problems[::-1], 2, weights_fn)


def test_prompts_with_examples_are_sampled_from_with_a_sampler_of_their_length(made, tmp_path):
    config, policy, _, problems = made
    rows = examples_of("generator", read_examples(config), 2)
    asked = with_examples(policy, rows, samples=2)
    longest = asked.policy.config.max_prompt
    assert longest % self_sampling.UNIT == 0 and longest > policy.config.max_prompt + 500
    sizes = asked.policy.sampler.config
    assert sizes.prompt_buckets == (longest,) and sizes.cache_buckets == policy.sampler.config.cache_buckets
    found = sampler_of(made).sample(tmp_path / "a", asked, problems[:3], 2, policy.load_params)
    assert len({one.text for own in found for one in own}) == 6
    plain = sampler_of(made).sample(tmp_path / "b/a", plainly(policy, 0.7), problems[:3], 2, policy.load_params)
    assert found != plain


def test_as_many_examples_are_shown_as_fit_the_positions(made):
    config, policy, _, _ = made
    rows = examples_of("generator", read_examples(config), 2)
    every = with_examples(policy, rows, samples=2).policy.config.max_prompt
    def with_positions(count):
        return dataclasses.replace(policy, model_config=dataclasses.replace(policy.model_config, max_position=count))

    fewer = with_examples(with_positions(every - 200), rows, samples=2)
    assert fewer.policy.config.max_prompt + policy.config.max_response <= every - 200
    with pytest.raises(ValueError, match=r"task.stage_one=self: one worked example takes \d+ tokens, .* 400 positions"):
        with_examples(with_positions(400), rows, samples=2)


def test_the_line_of_what_is_known_has_room_in_the_longest_prompt(made, monkeypatch):
    monkeypatch.setattr(self_sampling, "UNIT", 1)
    config, _, _, problems = made
    policy = policies_of(config)["verifier"]
    text = "<think>\n<step>1 + 1 = 2.</step>\n<step>So it is 2.</step>\n</think>\n<answer>\\boxed{2}</answer>"
    solution = with_known(solution_of(problems[0], text, 2), True, 1)
    length = len(prompt_ids(OWN["verifier"], policy.template, policy.tokenizer, solution, 10_000)[0])
    policy = self_sampling._at(policy, 1.0, max_prompt=length)  # the plain prompt just fits
    asked = with_examples(policy, examples_of("verifier", read_examples(config), 2), samples=2)
    [ids], [is_cut] = build_prompts(asked.policy, asked.prompt, [solution])
    assert not is_cut and "and step 2 is wrong.\n" in policy.tokenizer.decode(ids)[-100:]
    assert len(ids) <= asked.policy.config.max_prompt < len(ids) + 16


@pytest.mark.parametrize("sizes, rows, cache", [
    (SamplerConfig((160,), (160,), (16,)), 14, 0),  # 14 x (800 / 4 + 160) <= 16 x 320
    (SamplerConfig((160,), (160,), (1,)), 1, 0),
    (SamplerConfig((160,), (160,), (8, 16), cache_tokens=3200), 3, 3200),  # slots hold their prompts
    (SamplerConfig((160,), (160,), (8, 16), cache_tokens=700), 1, 960),
])
def test_longer_prompts_keep_to_the_planned_memory(sizes, rows, cache):
    found = self_sampling._longer(sizes, 800, samples=4)
    assert (found.row_buckets, found.cache_tokens, found.prompt_buckets) == ((rows,), cache, (800,))
    found.check_cache_tokens()
