"""Dynamic sampling: groups without signal give way to those of further problems, in the order in which they came."""

import dataclasses

import numpy as np
import pytest

from tango_jax.loop.dynamic_sampling import sample_until_full
from tango_jax.records import Problem, Responses, Rewards, Rollout, Term
from tango_jax.rl.algorithms import ALGORITHMS

P, M = 3, 2


def answer_batch(number: int, role: str = "generator", parents=None) -> Responses:
    """P problems with M responses each; response r of problem p of batch n is the token 100 n + 10 p + r."""
    parents = parents or [Problem(f"{number}/{place}", "", "") for place in range(P)]
    ids = [100 * number + 10 * place + sample for place in range(P) for sample in range(M)]
    rollout = Rollout(
        tokens=tuple(np.array([token]) for token in ids), logps=tuple(np.array([-float(token)]) for token in ids),
        is_truncated_B=np.array([token % 2 == 1 for token in ids]), decode_steps=4, row_steps=20,
    )  # fmt: skip
    metrics = {f"{role}/tokens_sampled": 6, f"{role}/length_max": 4 + number, f"{role}/length_mean": 2.0 * number,
               "grader/timeouts": number}
    return Responses(role, parents, [[place] for place in range(P)], M, rollout, [str(token) for token in ids], metrics)


def sample(rewards: list[list[float]], max_batches: int):
    """`rewards[n]` are those of the responses of batch n."""
    numbers = []

    def sample_batch(number: int) -> tuple[dict[str, Responses], Rewards]:
        numbers.append(number)
        reward_B = np.array(rewards[number], np.float32)
        return {"generator": answer_batch(number)}, Rewards(reward_B, {"generator/reward/outcome": reward_B.mean()})

    answers, reward, metrics = sample_until_full(sample_batch, "generator", ALGORITHMS["grpo"], max_batches)
    # The rewards are those of the chosen responses: a record is 100 n + 10 p + r.
    places = [divmod(int(record), 100) for record in answers["generator"].records]
    assert reward.reward_B.tolist() == [rewards[batch][place // 10 * M + place % 10] for batch, place in places]
    return answers["generator"], reward.metrics | metrics, numbers


def test_a_batch_with_signal_everywhere_stays_as_it_is():
    chosen, metrics, numbers = sample([[0, 1, 1, 0, 0, 1]], 5)
    assert numbers == [0]
    assert [problem.id for problem in chosen.parents] == ["0/0", "0/1", "0/2"]
    expected = answer_batch(0)
    assert chosen.records == expected.records and chosen.metrics == expected.metrics
    assert metrics == {
        "generator/reward/outcome": 0.5, "generator/groups_without_signal": 0.0, "generator/groups_filled_up": 0.0,
        "generator/batches_sampled": 1,
    }  # fmt: skip


def test_further_problems_replace_those_without_signal():
    chosen, metrics, numbers = sample([[0, 0, 0, 1, 0, 0], [1, 1, 1, 0, 0, 0], [0, 1, 0, 1, 1, 1]], 5)
    assert numbers == [0, 1, 2]  # 1 + 1 + 2 problems with a signal; the third batch has one too many
    assert [problem.id for problem in chosen.parents] == ["0/1", "1/1", "2/0"]
    assert chosen.records == ["10", "11", "110", "111", "200", "201"]
    assert [int(tokens[0]) for tokens in chosen.rollout.tokens] == [10, 11, 110, 111, 200, 201]
    assert [float(logps[0]) for logps in chosen.rollout.logps] == [-10, -11, -110, -111, -200, -201]
    assert chosen.rollout.is_truncated_B.tolist() == [False, True] * 3
    assert chosen.prompts == [[1], [1], [0]]
    # Everything that was sampled counts: three batches.
    assert (chosen.rollout.decode_steps, chosen.rollout.row_steps) == (12, 60)
    assert chosen.metrics == {"generator/tokens_sampled": 18, "generator/length_max": 6, "generator/length_mean": 2.0,
                              "grader/timeouts": 3}
    assert metrics["generator/reward/outcome"] == pytest.approx(np.mean([1 / 6, 3 / 6, 4 / 6]))
    assert metrics["generator/groups_without_signal"] == pytest.approx(5 / 9)
    assert (metrics["generator/groups_filled_up"], metrics["generator/batches_sampled"]) == (0.0, 3)


def test_at_the_limit_problems_without_signal_fill_the_batch():
    chosen, metrics, numbers = sample([[0] * 6, [0, 0, 0, 0, 0, 1]], 2)
    assert numbers == [0, 1]
    assert [problem.id for problem in chosen.parents] == ["1/2", "0/0", "0/1"]
    assert metrics["generator/groups_filled_up"] == pytest.approx(2 / 3)
    assert metrics["generator/groups_without_signal"] == pytest.approx(5 / 6)


def test_what_was_answered_before_the_learner_goes_with_its_problem():
    """In a verifier's turn a solution of each problem is judged M times; solution and judgements stay together."""

    rewards = iter([[0, 0, 1, 0, 0, 0], [1, 0, 0, 0, 0, 1]])

    def sample_batch(number: int) -> tuple[dict[str, Responses], Rewards]:
        solved = answer_batch(number)
        solved = dataclasses.replace(
            solved, group_size=1, records=solved.records[::M],
            rollout=dataclasses.replace(solved.rollout, tokens=solved.rollout.tokens[::M],
                                        logps=solved.rollout.logps[::M],
                                        is_truncated_B=solved.rollout.is_truncated_B[::M]))  # fmt: skip
        reward_B = np.array(next(rewards))
        weight_B = np.full(len(reward_B), 2.0 + number)  # another in each batch
        reward = Rewards(reward_B, {}, (Term("own", 2.0, reward_B / 2), Term("other", weight_B, reward_B)))
        judged = answer_batch(number, "verifier", solved.records)
        return {"generator": solved, "verifier": dataclasses.replace(judged, places=[0, 1, 2])}, reward

    answers, reward, metrics = sample_until_full(sample_batch, "verifier", ALGORITHMS["rloo"], 3)
    assert reward.reward_B.tolist() == [1, 0, 1, 0, 0, 1]
    own, other = reward.terms
    assert (own.name, own.weight.tolist(), own.value.tolist()) == ("own", [2.0] * 6, [0.5, 0, 0.5, 0, 0, 0.5])
    assert (other.name, other.weight.tolist()) == ("other", [2.0, 2.0, 3.0, 3.0, 3.0, 3.0])
    assert [problem.id for problem in answers["generator"].parents] == ["0/1", "1/0", "1/2"]
    assert answers["generator"].records == answers["verifier"].parents == ["10", "100", "120"]
    assert answers["verifier"].places.tolist() == [0, 1, 2]
    assert answers["verifier"].records == ["10", "11", "100", "101", "120", "121"]
    assert metrics["verifier/groups_without_signal"] == pytest.approx(3 / 6)


def test_one_batch_alone_is_taken_as_it_is():
    chosen, metrics, numbers = sample([[0, 0, 0, 1, 0, 0]], 1)
    assert numbers == [0] and chosen.records == answer_batch(0).records
    assert metrics == {"generator/reward/outcome": pytest.approx(1 / 6),
                       "generator/groups_without_signal": pytest.approx(2 / 3)}  # fmt: skip


def test_places_move_with_their_problem():
    """The verifier is asked about one of the M solutions of each problem; its place is among those that were chosen."""
    rewards = iter([[0, 0, 0, 1, 0, 0], [1, 0, 0, 0, 0, 1]])

    def sample_batch(number: int) -> tuple[dict[str, Responses], Rewards]:
        solved, places = answer_batch(number), np.array([1, 2, 5])
        judged = answer_batch(number, "verifier", [solved.records[place] for place in places])
        return {"generator": solved, "verifier": dataclasses.replace(judged, places=places)}, Rewards(
            np.array(next(rewards)), {})  # fmt: skip

    answers, _, _ = sample_until_full(sample_batch, "verifier", ALGORITHMS["grpo"], 3)
    solved, judged = answers["generator"], answers["verifier"]
    assert judged.parents == ["10", "101", "121"]
    assert [solved.records[place] for place in judged.places] == judged.parents


def test_second_tries_give_a_group_its_signal():
    """Both solutions of each problem are wrong, and a second try of the second problem is right."""

    def sample_batch(number: int) -> tuple[dict[str, Responses], Rewards]:
        solved = answer_batch(number)
        second = dataclasses.replace(solved, records=["a", "b"], places=[1, 2])
        return {"generator": solved, "second_solution": second}, Rewards(np.array([0, 0, 0, 0, 0, 0, 0, 1.5]), {})

    _, reward, metrics = sample_until_full(sample_batch, "generator", ALGORITHMS["grpo"], 1)
    assert len(reward.reward_B) == 8
    assert metrics == {"generator/groups_without_signal": pytest.approx(2 / 3)}


def test_a_metric_that_some_batches_lack_is_of_those_that_have_it():
    metrics = iter([{}, {"own": 2.0}, {"own": 4.0}])
    rewards = iter([[0] * 6, [0] * 6, [1, 0] * 3])

    def sample_batch(number: int) -> tuple[dict[str, Responses], Rewards]:
        return {"generator": answer_batch(number)}, Rewards(np.array(next(rewards), np.float32), next(metrics))

    _, reward, _ = sample_until_full(sample_batch, "generator", ALGORITHMS["grpo"], 3)
    assert reward.metrics == {"own": 3.0}
