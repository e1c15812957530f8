"""Lengths that a plan assumes, with their mean, their share at the limit and a run's rollouts by hand."""

import json

import numpy as np
import pytest

from tango_jax.cli.command_line import load_config
from tango_jax.planning.assumed_lengths import (
    DEFAULT,
    Even,
    LogNormal,
    evenly_spaced_lengths,
    log_normal_lengths,
    parse_lengths,
)


@pytest.fixture(scope="module")
def config():
    return load_config("tiny", ["generator.max_prompt=100", "generator.max_response=200",
                                "verifier.max_prompt=340", "verifier.max_response=300"])


def test_a_log_normal_by_hand():
    """log(X / 1000) has the mean -1 and the deviation 1, so X exceeds 1000 with probability 1 - Phi(1) = 0.158655. The
    mean of min(X, 1000) / 1000 is exp(1/2 - 1) Phi(1 - 1) + 0.158655 = 0.606531 / 2 + 0.158655; the median is 1 / e."""
    lengths = log_normal_lengths(20_001, 1000, 461.92, 0.158655)
    assert lengths.mean() == pytest.approx(461.92, abs=0.05)
    assert (lengths == 1000).mean() == pytest.approx(0.158655, abs=2e-4)
    assert np.median(lengths) == 368 and lengths[0] == 1000 and (np.diff(lengths) <= 0).all()
    assert log_normal_lengths(20_001, 1000, 0.46192, 0.158655).tolist() == lengths.tolist()  # as a share


@pytest.mark.parametrize("mean, cut", [(600, 0.02), (100, 0.001), (1500, 0.4), (1900, 0.02)])
def test_the_mean_and_the_share_at_the_limit_are_the_given_ones(mean, cut):
    lengths = log_normal_lengths(2000, 2048, mean, cut)
    assert lengths.mean() == pytest.approx(mean, rel=0.002)
    assert (lengths == 2048).sum() == pytest.approx(2000 * cut, abs=1)  # one may be rounded up to it


def test_lengths_are_spread_around_their_mean():
    assert evenly_spaced_lengths(5, 100, 0.5).tolist() == [100, 75, 50, 25, 1]
    assert evenly_spaced_lengths(3, 100, 0.25).tolist() == [50, 25, 1]
    assert evenly_spaced_lengths(3, 100, 0.75).tolist() == [100, 75, 50]


def test_what_may_be_written(config):
    assert parse_lengths("even:0.5") == Even(0.5)
    assert parse_lengths("lognormal:60,0.1") == LogNormal(60, 0.1, 0.3)
    assert parse_lengths("lognormal:60,0.1,20") == LogNormal(60, 0.1, 20)
    assert parse_lengths(DEFAULT) == LogNormal(0.3, 0.02)
    lengths = parse_lengths("lognormal:60,0.1,20")
    assert lengths.responses(config, "generator", 1000).mean() == pytest.approx(60, abs=0.5)
    assert lengths.responses(config, "verifier", 1000).mean() == pytest.approx(60, abs=0.5)
    assert lengths.prompts(config, "generator", 1000).mean() == pytest.approx(20, abs=0.5)


def test_the_verifiers_prompts_hold_a_solution(config):
    """Prompts of 20 and solutions of 60 tokens on average; 340 - 100 - 200 = 40 are left for the rest."""
    prompts = LogNormal(60, 0.1, 20).prompts(config, "verifier", 1000)
    assert prompts.mean() == pytest.approx(20 + 60 + 40, abs=0.5) and (np.diff(prompts) <= 0).all()
    narrow = config.copy_and_resolve_references()
    narrow.verifier.max_prompt = 100
    assert LogNormal(60, 0.1, 20).prompts(narrow, "verifier", 1000).max() == 100


@pytest.mark.parametrize("lengths, name", [
    (LogNormal(250, 0.02), "generator.max_response=200, the mean lies between"),
    (LogNormal(0.3, 0.5), "generator.max_response=200, the mean lies between 104 and 200 tokens, and 60 does not"),
    (LogNormal(60, 0.02, 100), "generator.max_prompt=100"),
])
def test_means_that_are_impossible(config, lengths, name):
    with pytest.raises(ValueError, match=name):
        lengths.check(config)


def test_lengths_of_a_run(config, tmp_path):
    """Four solutions and two verifications; those of evaluations and the solutions of the verifier's turns, which are
    samples of another kind of turn, do not count."""
    folder = tmp_path / "rollouts"
    folder.mkdir()
    rows = [{"role": "generator", "solution": {"tokens": tokens}, "verifications": []} for tokens in (10, 500, 30, 20)]
    (folder / "turn_000001_generator_000000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    row = {"role": "verifier", "solution": {"tokens": 77}, "verifications": [{"tokens": 5}, {"tokens": 7}]}
    (folder / "turn_000002_verifier_000000.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "evaluation_000002_000001.jsonl").write_text(json.dumps(row | {"role": "evaluation"}) + "\n")
    lengths = parse_lengths(str(tmp_path))
    assert lengths.responses(config, "generator", 4).tolist() == [200, 30, 20, 10]  # 500 is cut at max_response
    assert lengths.responses(config, "generator", 8).tolist() == [200, 200, 30, 30, 20, 20, 10, 10]
    assert lengths.responses(config, "verifier", 2).tolist() == [7, 5]
    assert "4 of the generator and 2 of the verifier" in str(lengths)
    (folder / "turn_000002_verifier_000000.jsonl").rename(tmp_path / "moved.jsonl")
    with pytest.raises(ValueError, match="its rollouts have no response of the verifier"):
        parse_lengths(str(tmp_path))
    (folder / "turn_000001_generator_000000.jsonl").unlink()
    (tmp_path / "moved.jsonl").rename(folder / "turn_000002_verifier_000000.jsonl")
    assert parse_lengths(str(tmp_path)).responses(config, "generator", 1).tolist() == [77]  # as of fixed_generator


def test_rows_about_no_solution_have_no_length_of_one(tmp_path):
    """As of one's own verifier, trained alone on several solutions at once."""
    path = tmp_path / "rollouts/turn_000001_verifier_000000.jsonl"
    path.parent.mkdir()
    rows = [{"role": "verifier", "solution": None, "verifications": [{"tokens": 5}]},
            {"role": "verifier", "solution": {"tokens": 10}, "verifications": [{"tokens": 7}]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    lengths = parse_lengths(str(tmp_path))
    assert {role: tokens.tolist() for role, tokens in lengths.tokens.items()} == {"generator": [10], "verifier": [7, 5]}
    path.write_text(json.dumps(rows[0]) + "\n")
    with pytest.raises(ValueError, match="its rollouts have no response of the generator"):
        parse_lengths(str(tmp_path))


def test_second_tries_of_a_run_count(config, tmp_path):
    folder = tmp_path / "rollouts"
    folder.mkdir()
    row = {"role": "generator", "solution": {"tokens": 10}, "verifications": [{"tokens": 5}]}
    rows = [row | {"second_try": {"tokens": 20}, "later_tries": [{"tokens": 30}, {"tokens": 40}]}, row]
    (folder / "turn_000001_generator_000000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert parse_lengths(str(tmp_path)).responses(config, "generator", 5).tolist() == [40, 30, 20, 10, 10]


def test_the_words_tell_the_mean_before_dynamic_sampling(tmp_path):
    """Twelve responses of 50 tokens, then four of 10: a mean of 40. The verifier's turn drew one batch."""
    folder = tmp_path / "rollouts"
    folder.mkdir()
    row = {"role": "generator", "solution": {"tokens": 10}, "verifications": [{"tokens": 5}]}
    (folder / "turn_000001_generator_000000.jsonl").write_text(json.dumps(row) + "\n")
    assert "dynamic sampling" not in str(parse_lengths(str(tmp_path)))
    rows = [{"phase": role, f"{role}/batches_sampled": batches, f"{role}/length_mean": mean,
             f"{role}/tokens_sampled": tokens}
            for role, batches, mean, tokens in (("generator", 3, 50.0, 600), ("generator", 1, 10.0, 40),
                                                ("verifier", 1, 5.0, 20))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = str(parse_lengths(str(tmp_path)))
    assert "chose these; the mean of all first responses in a role's own turns was 40 of the generator)" in told


@pytest.fixture
def scored_run(tmp_path):
    """Its verifier reads texts of five tokens, and dynamic sampling draws three batches."""
    folder = tmp_path / "rollouts"
    folder.mkdir()
    row = {"role": "verifier", "solution": {"tokens": 10}, "verifications": [{"tokens": 5}]}
    rows = [row | {"role": "generator"}, row]
    (folder / "turn_000001_verifier_000000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    row = {"phase": "verifier", "verifier/batches_sampled": 3, "verifier/length_mean": 5.0,
           "verifier/tokens_sampled": 0, "verifier/tokens_scored": 100}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    return tmp_path


def test_of_a_verifier_that_reads_there_is_no_mean_before_dynamic_sampling(scored_run):
    assert "dynamic sampling" not in str(parse_lengths(str(scored_run)))


def test_what_a_verifier_read_is_no_length_of_what_one_writes(scored_run):
    lengths = parse_lengths(str(scored_run))
    for settings in (["arm=scored"], ["arm=fixed_verifier", "verifier.template=qwen_prm"]):
        lengths.check(load_config("tiny", settings))
    for arm in ("tango", "grpo"):  # grpo's verifier writes in evaluations
        with pytest.raises(ValueError, match=f"that run reads marks, and that of arm={arm} writes, .* verifier writes"):
            lengths.check(load_config("tiny", [f"arm={arm}"]))
    (scored_run / "metrics.jsonl").unlink()
    written = parse_lengths(str(scored_run))
    written.check(load_config("tiny", []))
    with pytest.raises(ValueError, match="that run writes, and that of arm=scored reads marks, .* verifier reads mark"):
        written.check(load_config("tiny", ["arm=scored"]))


def test_a_process_reward_models_run_has_no_lengths_of_marks(scored_run):
    """It reads texts as well, and its verifications have no tokens."""
    for path in (scored_run / "rollouts").iterdir():
        path.write_text(path.read_text().replace('[{"tokens": 5}]', '[{"tokens": 0}]'))
    lengths = parse_lengths(str(scored_run))
    lengths.check(load_config("tiny", ["arm=fixed_verifier", "verifier.template=qwen_prm"]))
    for arm, does in (("scored", "reads marks"), ("tango", "writes"), ("grpo", "writes")):
        with pytest.raises(ValueError, match=f"is a process reward model, and that of arm={arm} {does}, "):
            lengths.check(load_config("tiny", [f"arm={arm}"]))
