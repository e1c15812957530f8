"""What an answer costs that is selected from k samples of a problem: sampled tokens, and FLOPs (models/flops.py).

Forward passes count, without padding. A problem's prompt is read once for all its samples; a verification's prompt,
which has the solution in it, once for all votes. Then each sample and each verification is written, token by token.
Where steps are read in one pass nothing is sampled, and the pass has FLOPs alone. The probability of a written verdict
costs nothing more: sampling has computed it.

The cost at k is the prompt's cost plus k times the mean cost of a sample and its judgement. The mean is over all
samples of the set, so it is the expectation over which k of them are used.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tango_jax.evaluation.shards import JudgedRow, SolvedRow
from tango_jax.models.flops import Work, forward_flops, reading, writing
from tango_jax.models.transformer import ModelConfig

_TOLERANCE = 1e-9  # relative, of sums in another order


class CostBasis(NamedTuple):
    """What costs depend on besides the rows."""

    prompt_tokens: Mapping[int, int]  # of the generator's prompts, by number of the problem
    generator: ModelConfig
    verifier: ModelConfig | None  # None: nothing is judged
    is_written: bool = True  # False: the verifier writes nothing


class Cost(NamedTuple):
    tokens: float  # sampled
    flops: float


class Costs(NamedTuple):
    """Means of a set, over the problems that were asked."""

    prompt: Cost  # of a problem
    sample: Cost
    verification: Cost | None  # of a sample; None: nothing is written
    scored: Cost | None  # of a sample, read in one pass; None: nothing is judged
    samples: int = 0  # that the means are over; `prompt`: over `problems`
    problems: int = 0

    def of(self, rule: str, k: int) -> Cost:
        """Of a problem, by a rule of voting.py."""
        of_one = [self.sample]
        if "_by_" in rule:
            of_one.append(self.scored if rule.endswith("_by_scored") else self.verification or self.scored)
        return Cost(*(once + k * sum(each) for once, *each in zip(self.prompt, *of_one, strict=True)))

    def most_samples(self, rule: str, measure: str, budget: float, limit: int) -> int:
        """The largest k up to `limit` that costs no more than the budget; 0: none."""
        return max((k for k in range(1, limit + 1) if is_within(self.of(rule, k), measure, budget)), default=0)


def is_within(cost: Cost, measure: str, budget: float) -> bool:
    return getattr(cost, measure) <= budget * (1 + _TOLERANCE)


def costs_of(
    basis: CostBasis, sampled: Sequence[SolvedRow], by_claim: Mapping[tuple[int, int], Sequence[JudgedRow]]
) -> Costs:
    """`sampled`: all samples of a set; `by_claim`: the votes of each (number, sample), or none. Problems whose prompt
    is too long have no samples; where that is so for all, everything costs nothing."""
    asked = [row for row in sampled if not row.is_too_long]
    prompts = [basis.prompt_tokens[number] for number in dict.fromkeys(row.number for row in asked)]
    count, over = max(len(asked), 1), {"samples": len(asked), "problems": len(prompts)}
    written = writing([basis.prompt_tokens[row.number] for row in asked], [row.num_tokens for row in asked])
    prompt = Cost(0.0, forward_flops(basis.generator, reading(prompts)) / max(len(prompts), 1))
    sample = Cost(written.tokens / count, forward_flops(basis.generator, written) / count)
    if not by_claim:
        return Costs(prompt, sample, None, None, **over)
    votes = [by_claim[row.number, row.sample] for row in asked]
    scored = Cost(0.0, forward_flops(basis.verifier, _scored(basis.verifier, asked, votes)) / count)
    if not basis.is_written:
        return Costs(prompt, sample, None, scored, **over)
    every = [vote for of_one in votes for vote in of_one]
    written = writing([vote.num_prompt for vote in every], [vote.num_tokens for vote in every])
    work = reading([of_one[0].num_prompt for of_one in votes]).plus(written)
    return Costs(prompt, sample, Cost(written.tokens / count, forward_flops(basis.verifier, work) / count), scored,
                 **over)


def _scored(verifier: ModelConfig, asked: Sequence[SolvedRow], votes: Sequence[Sequence[JudgedRow]]) -> Work:
    """Of the passes that read steps. A process reward model's head runs on all tokens, else the logits of the marks are
    needed."""
    lengths = [of_one[0].num_scored for of_one in votes]
    marks = sum(row.num_steps for row, length in zip(asked, lengths, strict=True) if length)
    return reading(lengths, sum(lengths) if verifier.score_head else marks)
