"""Alarms: each rings at what it is for, is silent just inside its limit, does not flicker, and is found again later."""

import json
import re

import pytest

from tango_jax.config import default_config, flatten
from tango_jax.tracking import alarms
from tango_jax.tracking.alarm_rules import LIMITS, RULES

# One turn of a run that is well; 100 solutions are graded in it.
HEALTHY = {
    "generator/tokens_sampled": 3000, "generator/length_mean": 30.0, "grader/errors": 0, "grader/timeouts": 0,
    "generator/steps_mean": 4.0, "generator/step_rewarded_share": 0.9, "generator/reward/outcome": 0.6,
    "verifier/reward/correctness": 0.7,
    "verifier/rate_correct": 0.55, "verifier/rate_invalid": 0.01, "verifier/outcome_balanced_accuracy": 0.7,
    **{f"{role}/{name}": value for role in ("generator", "verifier") for name, value in (
        ("truncation_rate", 0.01), ("logprob_gap_mean", 2e-4), ("logprob_gap_share", 0.001), ("entropy", 0.5),
        ("kl", 0.02), ("groups_without_signal", 0.4), ("useful_share", 0.7))},
}

SECOND_TRIES = {"second_try/tokens_sampled": 600, "second_try/length_mean": 30.0,
                "grader/second_try_errors": 0, "grader/second_try_timeouts": 0}
HINTS = {name.replace("second_try", "hint"): value for name, value in SECOND_TRIES.items()}


def run_of(changes: dict, turns: int = 15) -> list[dict]:
    """Rows of a healthy run, whose KL starts at 0, with other values where `changes` has a function of the turn."""
    rows = []
    for step in range(1, turns + 1):
        row = HEALTHY | {"step": step, "phase": "generator"}
        row |= {f"{role}/kl_first": 0.0 for role in ("generator", "verifier") if step == 1}
        row |= {name: value(step) if callable(value) else value for name, value in changes.items()}
        rows.append(row)
    return rows


def names(rows: list[dict], limits=LIMITS, ringing=()) -> set[str]:
    return {alarm.name for alarm in alarms.check(rows, ringing, limits)}


def since(turn: int, value: float, before: float):
    return lambda step: value if step >= turn else before


ONE_VERDICT = {"verifier/rate_correct": 0.96, "verifier/rate_invalid": 0.0, "verifier/outcome_balanced_accuracy": 0.5}
WITHOUT_TURNS = {name: None for name in ONE_VERDICT}  # a verifier that is not trained: seen in the generator's turns

# (alarm, what makes it ring, what is said of it, what is just inside the limit)
CASES = [
    *((f"{role}/{alarm}", {f"{role}/{name}": worse}, said, {f"{role}/{name}": inside})
      for role in ("generator", "verifier")
      for alarm, name, worse, said, inside in (
          ("truncation", "truncation_rate", 0.11, "11.0% of the", 0.099),
          ("padding", "useful_share", 0.39, "61% of the tokens that the", 0.41),
          # 7.5 % of the tokens: what TRL's issue 6789 reports of a sampler that disagreed with its trainer.
          ("logprob_gap", "logprob_gap_share", 0.075, "at 7.5% of the tokens", 0.019),
          ("logprob_gap", "logprob_gap_mean", 0.021, "by 0.021 nats", 0.019),
          ("reference", "kl_first", 0.02, "was 0.02 at its first update", since(2, 0.02, 0.009)),
          ("kl", "kl", since(2, 0.51, 0.0), "is 0.51 nats", since(2, 0.49, 0.0)),
          ("entropy", "entropy", since(6, 0.04, 0.5), "to 0.04 nats per token (a factor of 0.08", since(6, 0.051, 0.5)),
          ("entropy", "entropy", since(6, 1.6, 0.5), "to 1.6 nats per token (a factor of 3.2", since(6, 1.49, 0.5)),
          ("standing_still", "groups_without_signal", 0.96, "in 96.0% of the", 0.949),
          ("standing_still", "kl", 9e-7, "was at most 9e-07 in its last 5 turns", since(12, 1.1e-6, 0.0)))),
    ("verifier/one_verdict", ONE_VERDICT, "96.0% of the verdicts are CORRECT in the verifier's turns, with a balanced",
     ONE_VERDICT | {"verifier/rate_correct": 0.949}),
    ("verifier/one_verdict", ONE_VERDICT | {"verifier/rate_correct": 0.02}, "98.0% of the verdicts are INCORRECT",
     ONE_VERDICT | {"verifier/rate_correct": 0.02, "verifier/outcome_balanced_accuracy": 0.61}),  # as solutions are
    ("verifier/one_verdict", ONE_VERDICT | {"verifier/rate_correct": 0.01, "verifier/rate_invalid": 0.98},
     "98.0% of the verdicts are INVALID", ONE_VERDICT | {"verifier/rate_correct": 0.5, "verifier/rate_invalid": 0.4}),
    ("verifier/one_verdict",
     WITHOUT_TURNS | {name.replace("/", "/live_"): value for name, value in ONE_VERDICT.items()},
     "96.0% of the verdicts are CORRECT in the generator's turns", WITHOUT_TURNS),
    ("verifier/wrong_steps", {"verifier/right_verdict_wrong_steps": 0.6}, "60.0% of the right verdicts come with",
     {"verifier/right_verdict_wrong_steps": 0.49}),
    ("verifier/wrong_steps",
     {"verifier/rate_correct": None, "verifier/live_rate_correct": 0.5, "verifier/live_outcome_balanced_accuracy": 0.9,
      "verifier/live_right_verdict_wrong_steps": 0.7}, "balanced accuracy of the verdicts is 0.90",
     {"verifier/right_verdict_wrong_steps": 0.9, "verifier/outcome_balanced_accuracy": 0.59}),  # verdicts tell nothing
    ("verifier/misaligned", {"verifier/live_rate_misaligned": since(6, 0.61, 0.02)}, "61.0% of the verifications in",
     {"verifier/live_rate_misaligned": since(6, 0.29, 0.0)}),
    ("verifier/misaligned", {"verifier/live_rate_misaligned": 0.61}, "the solution gets no step rewards",
     {"verifier/live_rate_misaligned": 0.61, "generator/step_rewarded_share": None}),  # an arm without such rewards
    ("verifier/misaligned", {"verifier/live_rate_misaligned": 0.61}, "61.0% of the verifications in",
     {"verifier/live_rate_misaligned": lambda step: 0.61 if step <= 6 else None}),  # nothing is judged any more
    ("generator/step_count", {"generator/step_count_corr": -0.6, "generator/steps_approved": 0.9},
     "90% of the rewarded steps are approved, and the step advantages of a group follow the number of steps "
     "(correlation -0.60)",
     {"generator/step_count_corr": -0.6, "generator/steps_approved": 0.79}),
    ("generator/truncation", {**SECOND_TRIES, "second_try/truncation_rate": 0.9},
     "90.0% of the generator's responses to the prompt second_try ended",
     {**SECOND_TRIES, "second_try/truncation_rate": 0.09}),
    # Prompts of a user's method: answers to a generator's are graded.
    ("generator/truncation", {**HINTS, "hint/truncation_rate": 0.9},
     "90.0% of the generator's responses to the prompt hint ended", {**HINTS, "hint/truncation_rate": 0.09}),
    ("verifier/truncation", {"critique/truncation_rate": 0.9},
     "90.0% of the verifier's responses to the prompt critique ended",
     {"critique/truncation_rate": 0.09}),
    # Five turns of 100 answers: 6 are 1.2 %, 5 are 1 %.
    ("grader/failures", {"grader/errors": since(13, 1, 0), "grader/timeouts": since(13, 1, 0)},
     "failed on 6 of 500 answers (3 errors, 3 timeouts)", {"grader/errors": since(11, 1, 0)}),
    # And as many labels; and in each turn 20 second tries.
    ("grader/failures", {"grader/label_errors": since(13, 4, 0), "grader/label_timeouts": 0},
     "failed on 12 of 1000 answers (12 errors, 0 timeouts)",
     {"grader/label_errors": since(11, 2, 0), "grader/label_timeouts": 0}),
    ("grader/failures", {**SECOND_TRIES, "grader/second_try_timeouts": since(14, 4, 0)},
     "failed on 8 of 600 answers (0 errors, 8 timeouts)",
     {**SECOND_TRIES, "grader/second_try_timeouts": since(14, 3, 0)}),
    ("grader/failures", {**HINTS, "grader/hint_errors": since(14, 4, 0)},
     "failed on 8 of 600 answers (8 errors, 0 timeouts)", {**HINTS, "grader/hint_errors": since(14, 3, 0)}),
]


@pytest.mark.parametrize("name, wrong, said, right", CASES, ids=[f"{case[0]}: {case[2]}" for case in CASES])
def test_an_alarm_rings_beyond_its_limit_and_only_there(name, wrong, said, right):
    found = alarms.check(run_of(wrong))
    assert [alarm.name for alarm in found] == [name]
    assert said in found[0].seen
    assert names(run_of(right)) == set()


@pytest.mark.parametrize("changes", [
    {"generator/tokens_sampled": None, "generator/length_mean": None, "grader/label_errors": 9},  # a user's own prompt
    {"grader/vote_errors": 9},  # a user's metric
])
def test_failures_of_what_is_not_counted_are_no_share(changes):
    rows = [{name: value for name, value in row.items() if value is not None} for row in run_of(changes)]
    assert alarms.check(rows) == []


def test_wrong_steps_mislead_nobody_where_steps_are_not_rewarded():
    for unrewarded in ({"generator/step_rewarded_share": None}, {"generator/step_rewarded_share": 0.0},
                       {"generator/alpha": 0.0}):
        assert names(run_of({"verifier/right_verdict_wrong_steps": 0.6, **unrewarded})) == set()


@pytest.mark.parametrize("name, old", [
    ("generator/step_count", {"generator/step_count_corr": lambda step: -0.9 if step <= 6 else None,
                              "generator/steps_approved": 0.95}),
    ("generator/truncation", {**SECOND_TRIES, "second_try/truncation_rate": lambda step: 0.9 if step <= 6 else None}),
])
def test_what_is_no_longer_measured_does_not_ring(name, old):
    assert names(run_of(old, turns=6)) == {name}
    assert names(run_of(old, turns=12)) == set()


def test_every_alarm_is_among_the_cases():
    assert {case[0] for case in CASES} == set(RULES)


def test_messages_name_limits_and_keys_that_exist():
    keys = flatten(default_config())
    for name, wrong, *_ in CASES:
        (alarm,) = alarms.check(run_of(wrong))
        assert alarm.name == name
        assert {float(value) for value in re.findall(r"[\d.]+(?:e-\d+)?", alarm.limit)} <= set(LIMITS)
        for key in re.findall(r"\b(?:generator|verifier|rl|task)(?:\.\w+)+", alarm.advice):
            assert key in keys


@pytest.mark.parametrize("wrong, written, read", [
    ({"verifier/truncation_rate": 0.11}, "verifier.loss.mask_overlong", "raise verifier.max_response"),
    ({"verifier/live_rate_misaligned": 0.61}, "the verifier's stage 1", "raise verifier.max_response"),
    ({"verifier/rate_correct": 0.01, "verifier/rate_invalid": 0.98, "verifier/outcome_balanced_accuracy": 0.5},
     "the verifier's stage 1", "raise verifier.max_response"),
    ({"verifier/useful_share": 0.39}, "verifier.prompts_per_micro_batch=0", "raise verifier.pack_length"),
    ({"verifier/entropy": since(6, 0.04, 0.5)}, "no longer explores", "its marks are nearly certain"),
    ({"verifier/logprob_gap_mean": 0.021}, "verifier.top_p", "compare with verifier.model.compute_dtype=float32"),
    ({"verifier/kl": 0.6}, "read its responses", "look at its marks"),
    # A process reward model has neither.
    (ONE_VERDICT, "give the verifier's stage 1", "if the verifier has them, a longer stage 1 or warm-up"),
    ({"verifier/right_verdict_wrong_steps": 0.6}, "give the verifier's stage 1", "if the verifier has them, a longer"),
])
def test_a_verifier_that_does_not_write_gets_advice_of_its_own(wrong, written, read):
    [of_a_writer] = alarms.check(run_of(wrong))
    [of_a_reader] = alarms.check(run_of(wrong | {"verifier/tokens_scored": 300}))
    assert of_a_writer.seen == of_a_reader.seen and written in of_a_writer.advice
    assert read in of_a_reader.advice and written not in of_a_reader.advice


@pytest.mark.parametrize("read", [0, 300])
def test_advice_names_the_metrics_of_the_prompt_that_was_answered(read):
    """The verifier's own prompt is not sampled by a user's turns with another."""
    invalid = ONE_VERDICT | {"verifier/rate_correct": 0.01, "verifier/rate_invalid": 0.98}
    rows = run_of(invalid | {"critique/truncation_rate": 0.05, "critique/tokens_scored": read})
    rows = [{name: value for name, value in row.items() if name != "verifier/truncation_rate"} for row in rows]
    [alarm] = alarms.check(rows)
    assert "see critique/truncation_rate" in alarm.advice and "verifier/truncation_rate" not in alarm.advice
    assert ("critique/shortened_rate" in alarm.advice) == (read > 0)


@pytest.mark.parametrize("prefix, place", [("live_", "in the generator's turns"),
                                           ("judged_", "on a part of the solutions of the generator's turns")])
def test_verdicts_are_judged_where_they_are_given(prefix, place):
    """A verifier that says CORRECT of everything in the generator's turns, and judges well in its own."""
    own = {"verifier/rate_correct": 0.5, "verifier/rate_invalid": 0.0, "verifier/outcome_balanced_accuracy": 0.9}
    live = {name.replace("/", f"/{prefix}"): value for name, value in ONE_VERDICT.items()}
    rows = [row | (own if row["step"] % 4 == 0 else WITHOUT_TURNS | live) for row in run_of({}, turns=40)]
    (alarm,) = alarms.check(rows)
    assert alarm.name == "verifier/one_verdict"
    assert alarm.seen.startswith(f"96.0% of the verdicts are CORRECT {place}, with a balanced")


def test_a_generator_that_step_rewards_teach_does_not_stand_still():
    alike = {"generator/groups_without_signal": 1.0, "generator/step_rewarded_share": 0.9}
    assert names(run_of(alike | {"generator/alpha": 0.5})) == set()
    assert names(run_of(alike | {"generator/alpha": 0.001})) == {"generator/standing_still"}


def test_the_alarm_names_what_the_arm_rewards():
    """A majority's labels where grades say nothing, and a product of which agreement is one factor."""
    alike = {f"{role}/groups_without_signal": 1.0 for role in ("generator", "verifier")}
    labelled = alike | {"generator/reward/outcome": 0.0, "generator/labelled_right": 1.0}
    seen = {alarm.name: alarm.seen for alarm in alarms.check(run_of(labelled))}
    assert "generator/labelled_right is 1.00" in seen["generator/standing_still"]
    (alarm,) = alarms.check([row | {"phase": "verifier"} for row in run_of(
        {"verifier/groups_without_signal": 1.0, "verifier/reward/correctness": 1.0, "verifier/reward/quality": 0.0})])
    assert "verifier/reward/correctness is 1.00, verifier/reward/quality is 0.00" in alarm.seen


@pytest.mark.parametrize("warmup, left_out, later, rings", [
    (20, 0, 19, True), (20, 0, 21, False), (0, 0, 19, True),
    (10, 30, 3, True), (10, 30, 21, False),  # of a warm-up that ended early
])
def test_alarms_of_a_role_end_when_it_is_trained_no_more(warmup, left_out, later, rings):
    rows = run_of({"verifier/groups_without_signal": 1.0, "verifier/truncation_rate": 0.9}, turns=warmup or 5)
    rows = [row | {"phase": "warmup"} for row in rows]
    quiet = {name: None for name in rows[0] if name.startswith("verifier/")} | {"phase": "generator"}
    rows += [row | quiet for row in run_of({}, turns=later)]
    rows = [row | {"step": step + left_out * (row["phase"] == "generator")} for step, row in enumerate(rows, 1)]
    found = {name for name in names(rows) if name.startswith("verifier/")}
    assert found == ({"verifier/standing_still", "verifier/truncation"} if rings else set())


def test_a_verifier_with_a_teacher_does_not_stand_still():
    assert names(run_of({"verifier/groups_without_signal": 1.0, "verifier/teacher_kl": 0.1})) == set()


def test_groups_that_dynamic_sampling_replaced_teach_as_well():
    alike = {"generator/groups_without_signal": 0.99}
    assert names(run_of(alike | {"generator/groups_filled_up": 0.1})) == set()
    assert names(run_of(alike | {"generator/groups_filled_up": 0.99})) == {"generator/standing_still"}


@pytest.mark.parametrize("changes, ringing", [
    ({"generator/truncation_rate": 0.5, "verifier/groups_without_signal": 1.0, "verifier/kl": since(2, 5.0, 0.0)},
     set()),
    ({"verifier/logprob_gap_share": since(4, 0.5, 0.0), "grader/timeouts": since(4, 100, 0)},
     {"verifier/logprob_gap", "grader/failures"}),
])
def test_with_few_turns_only_gaps_and_the_grader_ring(changes, ringing):
    assert names(run_of(changes, turns=4)) == ringing


def test_the_first_kl_is_that_of_the_first_update_of_several():
    """Later updates of the first batch move the policy: its mean KL may be anything."""
    assert names(run_of({"generator/kl": 0.1, "generator/kl_first": 0.0}, turns=1)) == set()
    assert names(run_of({"generator/kl": 0.0, "generator/kl_first": 0.1}, turns=1)) == {"generator/reference"}


def test_what_a_run_does_not_log_rings_nothing():
    assert alarms.check([]) == []
    assert names([{"step": step, "phase": "generator", "generator/kl": None} for step in range(1, 9)]) == set()


def test_a_nearly_perfect_generator_may_be_approved_of():
    """Balanced accuracy counts the classes that occur: the verdict CORRECT alone is right where all solutions are."""
    assert names(run_of(ONE_VERDICT | {"verifier/outcome_balanced_accuracy": 1.0})) == set()


def watch(rows: list[dict], limits=LIMITS) -> list[str]:
    """Every row in turn, as a run sees them; writes the alarms into them and returns the lines that were said."""
    lines, ringing = [], frozenset()
    for index, row in enumerate(rows):
        found = alarms.check(rows[: index + 1], ringing, limits)
        row |= alarms.as_metrics(found, ringing)
        lines += alarms.messages(ringing, rows[: index + 1], found)
        ringing = alarms.ringing_at(row)
    return lines


def hovering() -> tuple[list[dict], dict]:
    """Seven turns about a limit of 0.1 that no window smooths; an alarm is over at 0.09."""
    rates = [0.05, 0.12, 0.095, 0.12, 0.095, 0.089, 0.099]
    limits = LIMITS._replace(window=1)
    return run_of({"generator/truncation_rate": lambda step: rates[step - 1]}, turns=7), limits


def test_an_alarm_is_said_once_and_once_that_it_is_over():
    rows, limits = hovering()
    lines = watch(rows, limits)
    assert [row.get("alarm/generator/truncation") for row in rows] == [None, 1, 1, 1, 1, 0, None]
    assert [line.split(":")[0] for line in lines] == [
        "alarm generator/truncation (turn 2)", "alarm generator/truncation is over (turn 6; it began at turn 2)",
    ]
    assert "12.0% of the generator's responses" in lines[0] and "the limit is 0.1." in lines[0]
    assert "What to try: read a few" in lines[0]


def test_an_alarm_began_at_a_turn_that_was_made():
    """A warm-up of one turn, which ended early: the next turn is number 12."""
    rows, limits = hovering()
    rows = [row | {"step": row["step"] + 10 * (row["step"] > 1)} for row in rows]
    assert watch(rows, limits)[1] == "alarm generator/truncation is over (turn 16; it began at turn 12)"


def test_a_run_that_is_well_has_no_alarms_in_its_rows():
    rows = run_of({}, turns=6)
    assert watch(rows) == []
    assert not any(name.startswith("alarm/") for row in rows for name in row)


def test_periods_are_found_again_in_the_file():
    rows, limits = hovering()
    rows += [row | {"step": row["step"] + 7} for row in run_of({"verifier/kl": 0.6, "generator/kl": 0.02}, turns=3)]
    watch(rows, limits)
    rows = json.loads(json.dumps([{"step": 0, "phase": "eval"}, *rows]))
    found = alarms.periods(rows, limits)
    assert [(period.name, period.first, period.last) for period in found] == [
        ("generator/truncation", 2, 6 - 1), ("verifier/kl", 8, None),
    ]
    assert "12.0%" in found[0].alarm.seen and "is 0.6 nats" in found[1].alarm.seen
    # Another version had another limit: the text is lost, the alarm is not.
    limits = limits._replace(kl=0.7)
    assert [period.alarm is None for period in alarms.periods(rows, limits)] == [False, True]
