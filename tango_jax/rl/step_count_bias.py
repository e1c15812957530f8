"""How much of each form of the step advantage is the number of steps: `python -m tango_jax.rl.step_count_bias`."""

from collections.abc import Sequence

import numpy as np

from tango_jax.config import default_config
from tango_jax.rl.algorithms import ALGORITHMS
from tango_jax.rl.step_norm import ELEMENTS, FORMS, step_advantage_BT

GROUP, GROUPS, FEWEST, MOST = 8, 400, 3, 8  # samples of a problem, random problems, steps of their solutions
SHARES = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
# Numbers of steps of the solutions of a problem, and the judgement of every step.
CASES = (((2,) * 4 + (8,) * 4, 1), ((4,) * 4 + (5,) * 4, 1), ((2,) * 4 + (8,) * 4, -1))


def first_token_advantage_B(form: str, judgements: Sequence[np.ndarray], group_size: int = GROUP) -> np.ndarray:
    """GRPO's step advantage of the first token, float [B], of solutions that are all right and one token a step.

    `judgements`: +1 or -1 for each step of each solution.
    """
    B, T = len(judgements), max(map(len, judgements))
    reward_BT, is_step_end_BT = np.zeros((B, T)), np.zeros((B, T), bool)
    for row, y in enumerate(judgements):
        reward_BT[row, : len(y)], is_step_end_BT[row, : len(y)] = y / len(y), True
    grpo, loss = ALGORITHMS["grpo"], default_config().generator.loss
    is_action_BT = np.ones((B, T), bool)
    if form == ELEMENTS:
        return grpo.step_fn(reward_BT, is_step_end_BT, is_action_BT, group_size, loss)[:, 0]
    return step_advantage_BT(form, grpo.baseline_fn, False, np.sign(reward_BT), is_step_end_BT,
                             is_step_end_BT.sum(axis=1), np.ones(B, bool), is_action_BT, group_size, loss)[:, 0]


def explained(form: str, share: float, seed: int = 0) -> tuple[float, float]:
    """Shares of the variance of the first token's advantage that the number of steps and the share of approved steps
    explain, each alone, where every step is approved with probability `share`. NaN: there is nothing to explain."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(FEWEST, MOST + 1, GROUPS * GROUP)
    judgements = [np.where(rng.random(n) < share, 1.0, -1.0) for n in counts]
    adv_B = first_token_advantage_B(form, judgements)
    return _squared_corr(adv_B, counts), _squared_corr(adv_B, np.array([y.mean() for y in judgements]))


def _squared_corr(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.corrcoef(a, b)[0, 1] ** 2) if np.std(a) and np.std(b) else np.nan


def main() -> None:
    forms = (ELEMENTS, *FORMS)
    print("Advantage of the first token, GRPO, all answers right. Steps of the eight solutions and their judgement:")
    print(f"{'':34}" + "".join(f"{form:>18}" for form in forms))
    for counts, y in CASES:
        few, many = counts[0], counts[-1]
        label = f"four of {few}, four of {many}, all {'approved' if y > 0 else 'rejected'}"
        advs = [first_token_advantage_B(form, [np.full(n, float(y)) for n in counts]) for form in forms]
        print(f"{label:34}" + "".join(f"{adv_B[0] + 0.0:+9.2f}{adv_B[-1] + 0.0:+9.2f}" for adv_B in advs))
    print(f"\nShare of its variance that the number of steps and the share of approved steps explain, each alone: "
          f"{GROUPS} problems,\n{GROUP} solutions of {FEWEST} to {MOST} steps each, every step approved with the "
          "probability given:")
    print(f"{'':34}" + "".join(f"{form:>18}" for form in forms))
    for share in SHARES:
        cells = (f"{by_count:9.2f}{by_share:9.2f}" for by_count, by_share in (explained(form, share) for form in forms))
        print(f"{share:<34}" + "".join(cells))


if __name__ == "__main__":
    main()
