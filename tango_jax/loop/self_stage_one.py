"""Stage 1 without a teacher, `task.stage_one=self`: a model learns the format from its own samples.

A round samples solutions to training problems, keeps those that the grader accepts and whose format is full, and
imitates them with the plain prompt, from the weights that the role starts with: STaR (Zelikman et al., arXiv
2203.14465) with several samples of a problem, as rejection sampling in RFT (Yuan et al., arXiv 2308.01825). The first
round's prompt shows worked examples. So does a later one's while of LOOKED_AT plain samples fewer are well formed than
of the samples with examples to the same prompts, in the last round that showed them. Both are sampled at the rounds'
temperature and read up to the closing tag. Only the share that the gate looks at is of whole samples at the turns'
temperature; the two are not compared.

The verifier learns likewise from its own judgements of the generator's solutions. Those are kept whose verdict agrees
with the grade, as many of right as of wrong solutions. Into a part of the right ones a wrong number is put, and a
judgement of such a solution is kept if it finds that step. With worked examples, and only there, the prompt always says
what is known (STaR's rationalisation, its section 3.3; tasks/worked_examples.py), and not only after a sampling without
it: one rule, and what is kept does not depend on how much was kept. Where all the same nothing of the verifier's can be
kept (or all solutions are right, or all wrong), it has no stage 1 and a line says so: turns reward the format and may
teach it. Without solutions of the generator's nothing can be learned, so there the run ends.

The rounds end when GATE of LOOKED_AT plain samples are well formed, when no more are kept than in the round before, or
after `self.rounds`. A round after the first that does not raise that share is not taken. WORKDIR/self/ROLE holds all
samples, the kept rows (kept_1.jsonl and so on, for task.stage_one=FILE of another run) and rounds.json; a run that is
started again reads them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from tango_jax.loop.init_from import sft_directory
from tango_jax.loop.self_rounds import CLOSING_TAG, HELP, Pupil, as_solution, learn
from tango_jax.loop.self_sampling import PartSampler, plainly
from tango_jax.method.texts import build_prompts
from tango_jax.records import Problem
from tango_jax.rl.policy import Policy
from tango_jax.runtime import hosts
from tango_jax.runtime.checkpoint import peek_meta
from tango_jax.runtime.checks import require
from tango_jax.runtime.console import Console
from tango_jax.tasks.self_text import SELF, Claim, choose_claims, claims_of, closed
from tango_jax.tasks.task import Task
from tango_jax.text.prompts import OWN
from tango_jax.tracking.provenance import Provenance
from tango_jax.tracking.run_config import keep_config


@dataclasses.dataclass(frozen=True)
class OwnStageOne:
    """For the roles of a run."""

    policies: Mapping[str, Policy]
    config: ConfigDict
    task: Task
    workdir: Path
    console: Console
    preemption: hosts.Preemption
    provenance: Provenance | None

    def is_finished(self, role: str) -> bool:
        return hosts.from_first(peek_meta(sft_directory(self.workdir, role) / "checkpoints") is not None)

    def prompts_of(self, role: str, weights_fn: Callable[[], dict]) -> Sequence[Problem | Claim]:
        """What the role's samples are about. `weights_fn`: the generator's, after its stage 1. Raises ValueError: none
        of its solutions can be judged."""
        problems = _problems(self.config, self.task)
        if role == "generator":
            return problems
        config, samples = self.config, self.config[SELF].samples
        sampled = self._sampler().sample(self.workdir / SELF / role / "solutions",
                                         plainly(self.policies["generator"]), problems, samples, weights_fn)
        texts = [[(closed(one.text, CLOSING_TAG["generator"]), one.is_right) for one in own] for own in sampled]
        claims = claims_of(problems, texts, self.task.min_steps, config.seed)
        _, is_cut = build_prompts(self.policies[role], OWN[role], list(map(as_solution, claims)))
        fitting = [claim for claim, cut in zip(claims, is_cut, strict=True) if not cut]
        claims = choose_claims(fitting, len(problems))
        require(bool(claims), f"task.stage_one=self: of {samples * len(problems)} samples of the generator, none are "
                f"well formed and fit the verifier's prompt, so it has nothing to judge: {HELP}")
        return claims

    def learn(
        self, role: str, parents: Sequence[Problem | Claim], weights_fn: Callable[[Any], dict],
        imitate_fn: Callable[[Task, Path, str], Any], save_untrained_fn: Callable[[], None],
    ) -> None:
        """Leaves the result in WORKDIR/sft/ROLE. `parents`: `prompts_of`; the functions: see `Pupil` and `learn`."""
        tokenizers = {name: policy.tokenizer for name, policy in self.policies.items()}
        pupil = Pupil(self.policies[role], self.config, self.task, tokenizers, self.workdir / SELF / role,
                      self._sampler(), parents, weights_fn, imitate_fn)
        learn(pupil, self.console, save_untrained_fn, self.workdir)

    def _sampler(self) -> PartSampler:
        return PartSampler(self.config, self.task, self.console, self.preemption.check, self._begin)

    def _begin(self) -> None:
        """Stores the settings before what depends on them."""

        def keep() -> None:
            if self.provenance is not None:
                self.provenance.keep(self.workdir)
            keep_config(self.config, self.workdir / "config.json")

        hosts.in_first(keep)


def _problems(config: ConfigDict, task: Task) -> list[Problem]:
    """The first training problems, each once."""
    drawn = (task.train_problem(index) for index in range(config[SELF].problems))
    return list({problem.id: problem for problem in drawn}.values())
