"""The pages that report experiments say what the code of now makes of their tables."""

import re
from pathlib import Path

import pytest

from tango_jax.ablation.summary import METHODS, summarize
from tango_jax.tracking.evaluations import read_tables
from tango_jax.tracking.intervals import difference, gap_share
from tango_jax.tracking.learning_curve import curves_by_setting, mean_accuracy

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"


def one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize("page, tables", [
    ("when_it_pays.md", "when_it_pays.csv"), ("last_letter_results.md", "last_letter.csv"),
])  # fmt: skip
def test_every_table_of_a_page_is_what_the_code_makes_of_its_csv(page, tables):
    made = summarize(read_tables([CONFIGS / tables])).splitlines()
    heads = {line for line in made if line.startswith(("| arm |", "| arm / arm |"))}
    shown, is_made = [], False
    for line in (CONFIGS / page).read_text().splitlines():
        is_made = line in heads or (is_made and line.startswith("|"))
        shown += [line] * is_made
    assert len(shown) > 10
    assert [line for line in shown if line not in made] == []
    if page == "when_it_pays.md":
        assert one_line(METHODS) in one_line((CONFIGS / page).read_text())


def test_the_first_screens_numbers_are_those_of_the_table():
    arms = curves_by_setting(read_tables([CONFIGS / "when_it_pays.csv"]))["last_letter", "words=12"]
    mean = {arm: {unit: mean_accuracy(curve) for unit, curve in curves.items()} for arm, curves in arms.items()}
    readme, page = (one_line(path.read_text()) for path in (ROOT / "README.md", CONFIGS / "README.md"))
    ahead, share, fixed = (
        difference(mean["tango"], mean["grpo"]),
        gap_share(mean["tango"], mean["grpo"], mean["gold_steps"]),
        difference(mean["tango"], mean["fixed_verifier"]))  # fmt: skip
    assert all("{:+.2f} [{:+.2f}, {:+.2f}]".format(*ahead) in text for text in (readme, page))
    assert "closes {:.2f} [{:.2f}, {:.2f}] of the gap".format(*share) in page
    assert "a verifier never trained by RL by {:.2f} [{:.2f}, {:.2f}]".format(*fixed) in page
    tokens = {arm: sum(curves[unit].evaluations[-1].sampled_tokens for unit in arms["grpo_curriculum"])
              for arm, curves in arms.items() if arm in ("tango", "grpo_curriculum")}  # fmt: skip
    assert tokens["grpo_curriculum"] / tokens["tango"] == pytest.approx(0.2, abs=0.01)  # "for a fifth of the tokens"


def test_the_pretrained_models_runs_are_compared_over_the_steps_that_all_have():
    lines = summarize(read_tables([CONFIGS / "smollm2_last_letter.csv"])).splitlines()
    [row] = [line for line in lines if line.startswith("| tango / grpo |")]
    assert [cell.strip() for cell in row.strip("|").split("|")][2] == "18"
    assert row.endswith("| -0.049 | -1.120 |")
    page = one_line((CONFIGS / "smollm2_last_letter_results.md").read_text())
    assert "over the 18 steps that all have: mean accuracy 0.363 with `tango`, 0.411 with `grpo` and 0.455" in page
