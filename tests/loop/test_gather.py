"""Responses of several processes are, bit by bit, those that one process would have."""

import numpy as np
import pytest

from support.together import Together
from tango_jax.loop.gather import gather
from tango_jax.method.texts import make_solution, make_verification
from tango_jax.records import Problem, Rollout
from tango_jax.runtime import hosts
from tango_jax.tasks.task import Task

PROBLEM = Problem("p", "q", "4")
TASK = Task("own", "string", 1, lambda _: PROBLEM, lambda _: PROBLEM, gold_steps=lambda _, steps: (True,) * len(steps))
LENGTHS = (3, 900, 1, 40, 0, 7)


def sampled(role: str) -> tuple[list, Rollout]:
    random, records = np.random.default_rng(0), []
    for number, length in enumerate(LENGTHS):
        text = f"<think><step>of {number} é \U0001d54f</step></think>" + "x" * length
        ends = [len(text) * (token + 1) // length for token in range(length)]
        solution = make_solution(TASK, PROBLEM, text, ends, False, number == 1)
        records.append(solution if role == "generator" else make_verification(solution, text, ends, False))
    return records, Rollout(
        tokens=tuple(random.integers(0, 2**31 - 1, length, np.int32) for length in LENGTHS),
        logps=tuple(random.normal(size=length).astype(np.float32) for length in LENGTHS),
        is_truncated_B=np.array([number == 1 for number in range(len(LENGTHS))]), decode_steps=900, row_steps=1000,
    )


def part_of(rollout: Rollout, index: int) -> Rollout:
    tokens, logps, is_truncated_B = map(hosts.own_part, (rollout.tokens, rollout.logps, rollout.is_truncated_B))
    return Rollout(tokens, logps, is_truncated_B, max(map(len, tokens), default=0), 100 + index)


@pytest.mark.parametrize("role", ["generator", "verifier"])
@pytest.mark.parametrize("processes", [1, 2, 4, 8])  # of eight, two have nothing
def test_all_processes_have_all_responses(monkeypatch, role, processes):
    records, rollout = sampled(role)
    together = Together(monkeypatch, processes)
    for found, gathered in together.run(lambda index: gather(hosts.own_part(records), part_of(rollout, index))):
        assert found == records
        assert [type(one.token_ends) for one in found] == [type(one.token_ends) for one in records]
        for name, dtype in (("tokens", np.int32), ("logps", np.float32)):
            rows, expected = getattr(gathered, name), getattr(rollout, name)
            assert isinstance(rows, tuple) and {row.dtype for row in rows} == {np.dtype(dtype)}
            assert [row.tobytes() for row in rows] == [row.tobytes() for row in expected]
        np.testing.assert_array_equal(gathered.is_truncated_B, rollout.is_truncated_B, strict=True)
        assert (gathered.decode_steps, gathered.row_steps) == (900, sum(range(100, 100 + processes)))
    assert {len(shapes) for shapes in together.exchanged} == {0 if processes == 1 else 2}  # messages
