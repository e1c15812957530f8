"""What the notebooks stand on: pictures of tokens, records as text, live curves."""

import json

import numpy as np
import pytest

from tango_jax.notebook.live import draw_stage_one, draw_turns, inline_page, last_line, live_curves
from tango_jax.notebook.pictures import (
    Strip,
    piece_of_tokens,
    rollout_figure,
    share_colours,
    signed_colours,
    texts_between,
    token_figure,
)
from tango_jax.notebook.shapes import describe
from tango_jax.records import Problem, Rollout
from tango_jax.tracking.metrics import MetricsWriter


def test_tokens_and_the_spans_they_end_in():
    # "<a>" "#1" "x" "</a>" "." with a span over the first four tokens' characters 3 to 10
    assert piece_of_tokens([3, 5, 6, 10, 11], [(3, 10)]) == [None, 0, 0, 0, None]
    assert piece_of_tokens([2, 4, 4, 6], [(0, 2), (2, 6)]) == [0, 1, 1, 1]
    assert texts_between("ab cd", [2, 2, 5]) == ["ab", "∅", " cd"]


def test_colours_say_sign_and_size():
    red, green, blue, _ = signed_colours([0.0, 1.0])[0]
    assert (red, green, blue) == pytest.approx((1.0, 1.0, 1.0), abs=0.01)
    plus, minus = signed_colours([2.0, -2.0])
    assert plus[2] > plus[0] and minus[0] > minus[2]  # blue, vermilion
    assert signed_colours([1.0], limit=4.0)[0][0] > signed_colours([1.0])[0][0]  # paler against a larger limit
    likely, unlikely = share_colours([1.0, 0.1])
    assert likely[:3] == (1.0, 1.0, 1.0) and unlikely[2] < 0.3


def drawn_texts(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def test_strips_wrap_at_the_width_of_the_page():
    figure = token_figure("title", [Strip("label", ["x" * 60, "y" * 60, "z" * 60, " $5\n", "\u0900"])])
    assert drawn_texts(figure) == ["title", "label", "x" * 60, "y" * 60, "z" * 60, r"·\$5↵", "?"]
    boxes = [patch.get_xy() for patch in figure.axes[0].patches]
    assert [x for x, _ in boxes] == [0.0, pytest.approx(60.7), 0.0, pytest.approx(60.7), pytest.approx(65.4)]
    (y, y2, y3, y4, _) = (y for _, y in boxes)
    assert y == y2 < y3 == y4


@pytest.mark.parametrize(("verifications", "step_rewards", "notes"), [
    # A verifier that stops at the first error: the last step has no judgement and no reward.
    ([{"judgements": [True, False, None], "verdict": "INCORRECT", "is_aligned": True}], [[0.25, -0.25, None]],
     ["CORRECT +0.25, advantage +0.50", "INCORRECT -0.25, advantage +0.50", "not judged, advantage +0.50"]),
    ([{"judgements": [True], "verdict": "CORRECT", "is_aligned": False}], [None], ["not judged, advantage +0.50"] * 3),
    ([], [[0.25, 0.25, -0.25]],
     ["label +0.25, advantage +0.50", "label +0.25, advantage +0.50", "label -0.25, advantage +0.50"]),
    ([], [], ["advantage +0.50"] * 3),
])
def test_a_rollouts_steps_have_their_judgements_and_rewards(verifications, step_rewards, notes):
    text = "<step>a</step><step>b</step><step>c</step>"
    row = {
        "role": "generator", "turn": 3, "sample": 0, "problem": {"question": "q", "answer": "a"},
        "solution": {"text": text, "steps": [[0, 14], [14, 28], [28, 42]], "is_correct": False},
        "verifications": verifications, "step_rewards": step_rewards, "reward": {"total": 0.0},
        "advantage": {"total": [[42, 0.5, 42]]},
    }
    assert [text for text in drawn_texts(rollout_figure([row])) if "advantage" in text] == notes


def test_a_record_as_text():
    assert describe(Problem("p/1", "2+2?", "4")) == (
        "Problem\n  id        str  'p/1'\n  question  str  '2+2?'\n  answer    str  '4'\n  size      int  0"
    )
    tokens = (np.array([5, 6], np.int32), np.array([7], np.int32))
    logps = (np.zeros(2, np.float32), np.zeros(1, np.float32))
    lines = describe(Rollout(tokens, logps, np.array([True, False]), 3, 6)).splitlines()
    assert lines[1:4] == [
        "  tokens          2 x int32[1 to 2]    the first: 5 6",
        "  logps           2 x float32[1 to 2]  the first: 0 0",
        "  is_truncated_B  bool[2]              True False",
    ]


def test_curves_of_a_run_that_goes_on(tmp_path):
    assert draw_stage_one(tmp_path, "run") is None and draw_turns(tmp_path, "run") is None
    with MetricsWriter(tmp_path / "sft/generator/metrics.jsonl") as writer:
        writer.write(40, "sft", {"generator/sft_heldout_loss": 0.5})
        one_point = draw_stage_one(tmp_path, "run").data
        writer.write(80, "sft", {"generator/sft_heldout_loss": 0.2})
    assert draw_stage_one(tmp_path, "run").data != one_point
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        for step in range(3):
            assert draw_turns(tmp_path, "run") is None
            writer.write(step, "eval", {"generator_step": step, "generator/accuracy": 0.25,
                                        "verifier/pool/step_f1": 0.5})
    pictures = []
    for stops in (False, True):  # the legend of a verifier that stops tells of it
        settings = {"verifier.stop_at_first_error": stops}
        (tmp_path / "config.json").write_text(json.dumps(settings), encoding="utf-8")
        pictures.append(draw_turns(tmp_path, "run").data)
    assert pictures[0] != pictures[1] and pictures[0][:4] == pictures[1][:4] == one_point[:4] == b"\x89PNG"


def test_live_curves_end_with_the_run(tmp_path, capsys):
    with pytest.raises(ValueError, match="a mistake"), live_curves(tmp_path / "run", "run", every_s=0.01) as console:
        console.log("first line\nsecond line")
        raise ValueError("a mistake")
    assert last_line(tmp_path / "run/log.txt") == "second line"
    assert last_line(tmp_path / "none.txt") == ""


def test_a_page_keeps_its_text_in_a_frame(tmp_path):
    (tmp_path / "page.html").write_text('<p class="a">1 < 2 & "three"</p>', encoding="utf-8")
    shown = inline_page(tmp_path / "page.html").data
    assert 'srcdoc="&lt;p class=&quot;a&quot;&gt;1 &lt; 2 &amp; &quot;three&quot;&lt;/p&gt;"' in shown
    assert '<iframe sandbox="allow-scripts allow-modals"' in shown  # not allow-same-origin: no way into the notebook
