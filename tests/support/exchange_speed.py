"""How long processes take to exchange the responses that each sampled, and how many bytes each sends.

    PYTHONPATH=.:tests python -m support.exchange_speed [--processes=8] [--responses=1280] [--tokens=4096] [--runs=5]

Responses are random tokens and log-probs, with a text of four characters a token in eight steps. All processes run on
this machine: where it has fewer cores than processes, the CPU seconds of one process say more than the seconds.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

import jax
import numpy as np

from support.slurm_cluster import free_ports
from tango_jax.loop.gather import gather
from tango_jax.method.texts import make_solution, with_parents
from tango_jax.records import Problem, Rollout, Solution
from tango_jax.runtime import hosts
from tango_jax.tasks.task import Task

SAMPLES = 5


def made_up(owners: list[Problem], tokens: int) -> tuple[list[Solution], Rollout]:
    random, count = np.random.default_rng(jax.process_index()), len(owners)
    task = Task("made up", "string", 1, lambda _: owners[0], lambda _: owners[0])
    step = "<step>" + "words of a step " * (tokens // 32 - 2) + "</step>\n"
    solutions = []
    for number, problem in enumerate(owners):
        text = f"<think>{number}{step * 8}</think>\n<answer>\\boxed{{4}}</answer>"
        ends = [len(text) * (token + 1) // tokens for token in range(tokens)]
        solutions.append(make_solution(task, problem, text, ends, True))
    return solutions, Rollout(
        tokens=tuple(random.integers(0, 150_000, tokens, np.int32) for _ in owners),
        logps=tuple(random.random(tokens, np.float32) for _ in owners),
        is_truncated_B=np.zeros(count, bool), decode_steps=tokens, row_steps=tokens * count,
    )


def measure(responses: int, tokens: int, runs: int) -> None:
    hosts.connect()
    problems = [Problem(str(number), f"question {number} " * 20, "4") for number in range(-(-responses // SAMPLES))]
    owners = [problem for problem in problems for _ in range(SAMPLES)][:responses]
    solutions, rollout = made_up(list(hosts.own_part(owners)), tokens)
    hosts.compile_exchange()
    sent, send = [], hosts._allgather
    hosts._allgather = lambda data, size: (sent.append(size), send(data, size))[1]
    seconds, busy = [], []
    for run in range(runs + 1):
        hosts.from_first(run)  # all begin together
        sent.clear()
        began, began_cpu = time.perf_counter(), time.process_time()
        records, _ = gather(solutions, rollout)
        with_parents(records, owners)
        seconds.append(time.perf_counter() - began)
        busy.append(time.process_time() - began_cpu)
    if hosts.is_first():  # the first run touches new memory
        print(f"{jax.process_count()} processes, {responses} responses of {tokens} tokens: each process sends "
              f"{sum(sent) / 1e6:.1f} MB in {len(sent)} messages; {statistics.median(seconds[1:]):.2f} s, of them "
              f"{statistics.median(busy[1:]):.2f} s on a core (first: {seconds[0]:.2f} and {busy[0]:.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"processes": 8, "responses": 1280, "tokens": 4096, "runs": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    if "JAX_PROCESS_ID" in os.environ:
        measure(args.responses, args.tokens, args.runs)
        return
    together = {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_ports(1)[0]}", "JAX_NUM_PROCESSES": str(args.processes)}
    processes = [
        subprocess.Popen([sys.executable, "-m", "support.exchange_speed", *sys.argv[1:]],
                         env=os.environ | together | {"JAX_PLATFORMS": "cpu", "JAX_PROCESS_ID": str(number)})
        for number in range(args.processes)
    ]
    sys.exit(max(process.wait() for process in processes))


if __name__ == "__main__":
    main()
