"""Dynamic sampling: groups without signal give way to those of further problems, in the order in which they came."""

import dataclasses

import numpy as np
import pytest

from support.turns import responses_of, settings, solution, task_of, verification
from tango_jax.method import tango
from tango_jax.method.dynamic_sampling import over_calls
from tango_jax.method.turn import Turn, joined
from tango_jax.records import Memory, Problem, Responses, Rewards, Rollout, Term
from tango_jax.rl.algorithms import ALGORITHMS
from tango_jax.rl.schedule import Place
from tango_jax.text.prompts import SOLVE

P, M = 3, 2


class Numbered:
    """The work of a turn: response r to problem p of batch n is the token 100 n + 10 p + r, and that is its text."""

    def respond(self, prompt, parents, samples, path) -> Responses:
        number, role = path[3], prompt.role
        ids = [100 * number + 10 * place + sample for place in range(len(parents)) for sample in range(samples)]
        record = solution() if role == "generator" else verification()
        records = [dataclasses.replace(record, text=str(token)) for token in ids]
        rollout = Rollout(
            tokens=tuple(np.array([token]) for token in ids), logps=tuple(np.array([-float(token)]) for token in ids),
            is_truncated_B=np.array([token % 2 == 1 for token in ids]), decode_steps=4, row_steps=20,
        )
        metrics = {f"{role}/tokens_sampled": 12 * number + 12, f"{role}/length_max": 4 + number,
                   f"{role}/length_mean": 2.0 * number + 2.0,
                   "grader/timeouts": number}
        return responses_of(role, parents, samples, records).replace(rollout=rollout, metrics=metrics)


def turn_of(max_batches: int, role: str = "generator", algorithm: str = "grpo") -> Turn:
    task = task_of()._replace(train_problem=lambda index: Problem(f"{index // P}/{index % P}", "", ""))
    config = settings(P, M, dynamic_sampling=max_batches - 1)
    return Turn(config, task, Place(0, role, role, 0), Memory(), ALGORITHMS[algorithm], Numbered())


def texts_of(responses) -> list[str]:
    return [record.text for record in responses]


def ids_of(problems) -> list[str]:
    return [problem.id for problem in problems]


def sample(rewards: list[list[float]], max_batches: int):
    """`rewards[n]` are those of the responses of batch n."""
    numbers, t = [], turn_of(max_batches)

    def sample_batch(problems: list[Problem]) -> tuple[Responses, Rewards]:
        numbers.append(len(numbers))
        reward_B = np.array(rewards[numbers[-1]], np.float32)
        return t.sample("generator", problems, M), Rewards(reward_B, {"generator/reward/outcome": reward_B.mean()})

    chosen, reward = t.until_full(sample_batch)
    # The rewards are those of the chosen responses: a record is 100 n + 10 p + r.
    places = [divmod(int(text), 100) for text in texts_of(chosen)]
    assert reward.reward_B.tolist() == [rewards[batch][place // 10 * M + place % 10] for batch, place in places]
    assert t.draws == {"train": 1}
    return chosen, over_calls(t.everything()) | reward.metrics | t.metrics, numbers


def test_a_batch_with_signal_everywhere_stays_as_it_is():
    chosen, metrics, numbers = sample([[0, 1, 1, 0, 0, 1]], 5)
    assert numbers == [0]
    assert ids_of(chosen.parents) == ["0/0", "0/1", "0/2"]
    assert texts_of(chosen) == ["0", "1", "10", "11", "20", "21"]
    assert metrics == {
        "generator/tokens_sampled": 12, "generator/length_max": 4, "generator/length_mean": 2.0, "grader/timeouts": 0,
        "generator/reward/outcome": 0.5, "generator/groups_without_signal": 0.0, "generator/groups_filled_up": 0.0,
        "generator/batches_sampled": 1,
    }


def test_further_problems_replace_those_without_signal():
    chosen, metrics, numbers = sample([[0, 0, 0, 1, 0, 0], [1, 1, 1, 0, 0, 0], [0, 1, 0, 1, 1, 1]], 5)
    assert numbers == [0, 1, 2]  # 1 + 1 + 2 problems with a signal; the third batch has one too many
    assert ids_of(chosen.parents) == ["0/1", "1/1", "2/0"]
    assert texts_of(chosen) == ["10", "11", "110", "111", "200", "201"]
    assert [int(tokens[0]) for tokens in chosen.rollout.tokens] == [10, 11, 110, 111, 200, 201]
    assert [float(logps[0]) for logps in chosen.rollout.logps] == [-10, -11, -110, -111, -200, -201]
    assert chosen.rollout.is_truncated_B.tolist() == [False, True] * 3
    assert chosen.prompts == [[1], [1], [0]]
    # Everything that was sampled counts: three batches.
    assert (chosen.rollout.decode_steps, chosen.rollout.row_steps) == (12, 60)
    expected = {"generator/tokens_sampled": 72, "generator/length_max": 6, "generator/length_mean": 4.0,
                "grader/timeouts": 3}
    assert {name: metrics[name] for name in expected} == expected
    assert metrics["generator/reward/outcome"] == pytest.approx(np.mean([1 / 6, 3 / 6, 4 / 6]))
    assert metrics["generator/groups_without_signal"] == pytest.approx(5 / 9)
    assert (metrics["generator/groups_filled_up"], metrics["generator/batches_sampled"]) == (0.0, 3)


def test_at_the_limit_problems_without_signal_fill_the_batch():
    chosen, metrics, numbers = sample([[0] * 6, [0, 0, 0, 0, 0, 1]], 2)
    assert numbers == [0, 1]
    assert ids_of(chosen.parents) == ["1/2", "0/0", "0/1"]
    assert metrics["generator/groups_filled_up"] == pytest.approx(2 / 3)
    assert metrics["generator/groups_without_signal"] == pytest.approx(5 / 6)


def test_what_was_sampled_before_goes_with_its_problem():
    """In a verifier's turn a solution of each problem is judged M times; solution and judgements stay together."""
    rewards, t = iter([[0, 0, 1, 0, 0, 0], [1, 0, 0, 0, 0, 1]]), turn_of(3, "verifier", "rloo")

    def sample_batch(problems: list[Problem]) -> tuple[Responses, Rewards]:
        judged = t.sample("verifier", t.sample("generator", problems), M)
        reward_B, number = np.array(next(rewards)), int(judged[0].text) // 100
        weight_B = np.full(len(reward_B), 2.0 + number)  # another in each batch
        return judged, Rewards(reward_B, {}, (Term("own", 2.0, reward_B / 2), Term("other", weight_B, reward_B)))

    judged, reward = t.until_full(sample_batch, "verifier")
    assert reward.reward_B.tolist() == [1, 0, 1, 0, 0, 1]
    own, other = reward.terms
    assert (own.name, own.weight.tolist(), own.value.tolist()) == ("own", [2.0] * 6, [0.5, 0, 0.5, 0, 0, 0.5])
    assert (other.name, other.weight.tolist()) == ("other", [2.0, 2.0, 3.0, 3.0, 3.0, 3.0])
    solved, again = t.sampled
    assert ids_of(solved.parents) == ["0/1", "1/0", "1/2"]
    assert texts_of(solved) == ["10", "100", "120"] and judged.parents == list(solved) == again.parents
    assert texts_of(judged) == ["10", "11", "100", "101", "120", "121"]
    assert t.metrics["verifier/groups_without_signal"] == pytest.approx(3 / 6)
    assert [texts_of(one) for one in t.everything("generator")] == [["0", "10", "20"], ["100", "110", "120"]]


def test_one_batch_alone_is_taken_as_it_is():
    chosen, metrics, numbers = sample([[0, 0, 0, 1, 0, 0]], 1)
    assert numbers == [0] and texts_of(chosen) == ["0", "1", "10", "11", "20", "21"]
    assert metrics == {"generator/tokens_sampled": 12, "generator/length_max": 4, "generator/length_mean": 2.0,
                       "grader/timeouts": 0, "generator/reward/outcome": pytest.approx(1 / 6),
                       "generator/groups_without_signal": pytest.approx(2 / 3)}


def test_parents_move_with_their_problem():
    """The verifier judges one of the M solutions of each problem, which is still one of those that were chosen."""
    rewards, t = iter([[0, 0, 0, 1, 0, 0], [1, 0, 0, 0, 0, 1]]), turn_of(3, "verifier")

    def sample_batch(problems: list[Problem]) -> tuple[Responses, Rewards]:
        solved = t.sample("generator", problems, M)
        judged = t.sample("verifier", [solved[place] for place in (1, 2, 5)], M)
        return judged, Rewards(np.array(next(rewards)), {})

    t.until_full(sample_batch)
    solved, judged = t.sampled
    assert texts_of(judged.parents) == ["10", "101", "121"]
    assert all(any(parent is one for one in solved) for parent in judged.parents)


@pytest.mark.parametrize("max_batches", [1, 2])
def test_second_tries_give_a_problem_its_signal(max_batches):
    """Both solutions of each problem are wrong, and a second try of the second problem is right."""
    t = turn_of(max_batches)

    def sample_batch(problems: list[Problem]) -> tuple[Responses, Rewards]:
        first = t.sample("generator", problems, M)
        judged = t.sample("verifier", first)
        again = t.sample("generator", [judged[1], judged[2]], at_most=6)
        reward_B = np.zeros(8)
        reward_B[-1] = 1.5
        return joined([first, again], 12), Rewards(reward_B, {})

    chosen, reward = t.until_full(sample_batch)
    assert t.metrics["generator/groups_without_signal"] == pytest.approx(2 / 3)
    if max_batches == 1:
        assert len(reward.reward_B) == 8
        return
    # The problem with a signal of each batch, and of the first batch the first without: each with its second tries.
    assert [one.problem.id for one in chosen] == ["0/1"] * 3 + ["1/1"] * 3 + ["0/0"] * 3
    assert reward.reward_B.tolist() == [0, 0, 1.5, 0, 0, 1.5, 0, 0, 0]
    assert [rows.tolist() for rows in chosen.groups()] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert chosen.most_prompts == 12


@pytest.mark.parametrize("max_batches", [1, 2])
def test_groups_without_a_signal_are_counted_where_a_problem_has_several(max_batches):
    """Two solutions of each of three problems, each judged twice: one of the six groups has a signal."""
    t = turn_of(max_batches, "verifier")

    def sample_batch(problems: list[Problem]) -> tuple[Responses, Rewards]:
        judged = t.sample("verifier", t.sample("generator", problems, 2), M)
        return judged, Rewards(np.array([1, 0] + [0] * 10, np.float32), {})

    t.until_full(sample_batch, "verifier")
    assert t.metrics["verifier/groups_without_signal"] == pytest.approx(5 / 6)
    assert t.metrics.get("verifier/groups_filled_up") == (None if max_batches == 1 else pytest.approx(1 / 3))


@pytest.mark.parametrize("max_batches", [1, 2])
def test_metrics_of_a_turn_are_of_all_its_calls(max_batches):
    t = turn_of(max_batches)
    rewards = iter([[0, 0, 0, 1, 0, 1], [1, 0, 0, 1, 0, 1], [0, 0, 1, 1, 0, 0], [0, 1, 1, 1, 1, 0]])

    def sample_batch(problems: list[Problem]) -> tuple[Responses, Rewards]:
        return t.sample("generator", problems, M), Rewards(np.array(next(rewards), np.float32), {})

    for _ in range(2):
        t.until_full(sample_batch)
    # Groups without a signal: 1, 0, 3 and 1 of three.
    expected = (1 / 3 + 0) / 2 if max_batches == 1 else (1 / 6 + 4 / 6) / 2
    assert t.metrics["generator/groups_without_signal"] == pytest.approx(expected)


def test_a_metric_that_some_batches_lack_is_of_those_that_have_it():
    metrics, t = iter([{}, {"own": 2.0}, {"own": 4.0}]), turn_of(3)
    rewards = iter([[0] * 6, [0] * 6, [1, 0] * 3])

    def sample_batch(problems: list[Problem]) -> tuple[Responses, Rewards]:
        return t.sample("generator", problems, M), Rewards(np.array(next(rewards), np.float32), next(metrics))

    _, reward = t.until_full(sample_batch)
    assert reward.metrics == {"own": 3.0}


def test_prompts_of_one_stream_take_different_random_numbers():
    paths = []

    class Noted(Numbered):
        def respond(self, prompt, parents, samples, path) -> Responses:
            paths.append(path)
            return super().respond(prompt, parents, samples, path)

    config = settings(P, M)
    t = Turn(config, task_of(), Place(0, "generator", "generator", 0), Memory(), ALGORITHMS["grpo"], Noted())
    problems = t.problems()
    for prompt in (SOLVE, dataclasses.replace(SOLVE, name="terse"), SOLVE):
        t.sample("generator", problems, M, prompt=prompt)
    assert len(set(paths)) == 3 and {path[0] for path in paths} == {SOLVE.stream}


def test_calls_of_further_batches_are_numbered_from_those_before():
    calls, rewards = [], iter([[0, 0, 0, 1, 0, 0], [1, 0, 0, 0, 0, 1]])

    class Noted(Numbered):
        def respond(self, prompt, parents, samples, path) -> Responses:
            calls.append((path, samples))
            return super().respond(prompt, parents, samples, path)

    config = settings(P, M)
    config.rl.dynamic_sampling = 1
    t = Turn(config, task_of(), Place(0, "generator", "generator", 0), Memory(), ALGORITHMS["grpo"], Noted())
    t.sample("generator", t.problems(), 1)
    t.until_full(lambda problems: (t.sample("generator", problems, M), Rewards(np.array(next(rewards)), {})))
    assert [path[3:] for path, _ in calls] == [(0,), (0, 1), (1, 1)]  # batch, call
    assert {key: call.samples for key, call in t.calls.items()} == {("generator", 0): 1, ("generator", 1): M}


def test_the_share_of_right_solutions_is_of_all_that_were_sampled():
    """Of three problems whose solutions are right, right and wrong, one has verdicts that differ and is trained on."""

    class Judged(Numbered):
        def respond(self, prompt, parents, samples, path) -> Responses:
            if prompt.role == "generator":
                records = [dataclasses.replace(solution(place < 2), problem=one) for place, one in enumerate(parents)]
                return responses_of("generator", parents, 1, records)
            records = [dataclasses.replace(verification(verdict), of=one) for one in parents
                       for verdict in ("CORRECT", "CORRECT" if one.is_correct else "INCORRECT")]
            return responses_of("verifier", parents, samples, records)

    task = task_of()._replace(verifier_problem=lambda index: Problem(str(index), "", ""))
    config = settings(P, M, dynamic_sampling=1)
    t = Turn(config, task, Place(0, "verifier", "verifier", 0), Memory(), ALGORITHMS["grpo"], Judged())
    lesson = tango.judge(t)
    assert {one.of.is_correct for one in lesson.responses} == {True, False}  # one of two signals, and one to fill up
    assert lesson.metrics["verifier/solutions_correct"] == pytest.approx(2 / 3)


def call_of(prompts: int, samples: int, row_steps: int = 0, **metrics) -> Responses:
    call = responses_of("verifier", list(range(prompts)), samples, [verification()] * (prompts * samples))
    return call.replace(rollout=dataclasses.replace(call.rollout, row_steps=row_steps),
                        metrics={f"hint/{name}": value for name, value in metrics.items()})


@pytest.mark.parametrize("is_written", [True, False])
def test_a_mean_over_calls_counts_every_response_once(is_written):
    """And of a share of prompts, every prompt; also of a verifier that writes nothing."""
    tokens = (2560, 1000) if is_written else (0, 0)
    many = call_of(64, 4, tokens_sampled=tokens[0], length_mean=10.0, truncation_rate=0.0, shortened_rate=0.0)
    one = call_of(1, 1, tokens_sampled=tokens[1], length_mean=1000.0, truncation_rate=1.0, shortened_rate=1.0)
    assert over_calls([many, one]) == {
        "hint/tokens_sampled": sum(tokens), "hint/length_mean": pytest.approx(3560 / 257),
        "hint/truncation_rate": pytest.approx(1 / 257), "hint/shortened_rate": pytest.approx(1 / 65)}
    as_many = [call_of(96, 1, shortened_rate=1.0), call_of(12, 8, shortened_rate=0.0)]
    assert over_calls(as_many) == {"hint/shortened_rate": pytest.approx(96 / 108)}


def test_the_waste_of_several_calls_is_of_all_their_steps():
    """300 of 400 steps and 10 of 100 were wasted."""
    calls = [call_of(2, 1, row_steps=400, decode_waste=0.75), call_of(2, 1, row_steps=100, decode_waste=0.1)]
    assert over_calls(calls) == {"hint/decode_waste": pytest.approx(310 / 500)}
