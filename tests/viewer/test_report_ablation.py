"""The report of a real ablation, as a reader uses it: six arms over three seeds of configs/last_letter_short.py.

The runs are those of configs/results/last_letter_short.md from start B with the verifier at temperature 1: every
metric, and the rollouts of every tenth turn.
"""

import json
import tarfile
from pathlib import Path

import pytest

from support.paths import FIXTURES
from tango_jax.report import main
from tango_jax.tracking.rollout_dump import read_rollouts
from tango_jax.viewer.pack import FLAGS, flags_of
from tango_jax.viewer.runs import find_runs

ARMS = ("fixed_generator", "fixed_verifier", "fixed_verifier_warm", "gold_steps", "grpo", "tango")


@pytest.fixture(scope="module")
def ablation(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ablation")
    with tarfile.open(FIXTURES / "ablation.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def rollouts(ablation) -> list[dict]:
    """In the order of the page."""
    return [row | {"run": run.name} for run in find_runs([ablation]) for row in read_rollouts(run.rollouts)]


@pytest.fixture(scope="module")
def report(ablation, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    main([str(ablation), f"--out={path}"])
    assert path.stat().st_size < 20e6
    return path


@pytest.fixture
def page(browser, report):
    """Opened anew; afterwards nothing may have been logged."""
    browser.size(1440, 1000)
    browser.prefer("light")
    browser.open(report)
    browser.logged()
    yield browser
    assert browser.logged() == []


def found(page) -> int:
    return int(page.text("#found").removeprefix("all ").split()[0].replace(",", ""))


def test_every_arm_and_seed_is_there(page, ablation, rollouts):
    runs = find_runs([ablation])
    assert [run.name for run in runs] == [f"{arm}/seed_{seed}" for arm in ARMS for seed in (0, 1, 2)]
    assert page.js("document.querySelectorAll('#chart-run option').length") == 18
    assert page.text("#rollout-count").replace(",", "") == str(len(rollouts))
    shown = "tango/seed_0 · task last_letter · arm tango · seed 0 · 90 turns, finished"
    assert page.text(".headline p") == shown
    rows = page.js("[...document.querySelectorAll('#compare tbody tr')].map((row) => row.textContent)")
    assert len(rows) == len(ARMS)
    page.wait("document.querySelectorAll('#compare .plot.is-drawn').length >= 2")


def test_the_alarm_of_the_verifier_that_collapsed(page, ablation, rollouts):
    """tango, seed 0: from some turn on nearly every verdict is CORRECT."""
    metrics = [row for run in find_runs([ablation]) if run.name == "tango/seed_0" for row in run.rows]
    first = min(row["step"] for row in metrics if row.get("alarm/verifier/one_verdict"))
    row = page.js("[...document.querySelectorAll('#alarms tbody tr')].map((row) => [...row.children]"
                  ".map((cell) => cell.textContent)).find((cells) => cells[0] === 'verifier/one_verdict')")
    assert row[1].startswith(f"{first} to ") and "of the verdicts are CORRECT" in row[2]
    page.js("[...document.querySelectorAll('#alarms tbody tr')].find((row) => row.children[0].textContent === "
            "'verifier/one_verdict').querySelector('a').click()")
    page.wait("document.body.dataset.view === 'rollouts'")
    last = int(row[1].split()[2])
    expected = sum(item["run"] == "tango/seed_0" and first <= item["turn"] <= last for item in rollouts)
    assert found(page) == expected > 0


def test_filters_search_and_a_link(page, rollouts):
    page.click("#tab-rollouts")
    assert found(page) == len(rollouts)
    for number, name in enumerate(FLAGS, 1):
        page.click(f"#chips button:nth-child({number})")
        assert found(page) == sum(name in flags_of(row) for row in rollouts)
        page.click(f"#chips button:nth-child({number})")
    row = next(row for row in rollouts if row["role"] == "generator" and "false_accept" in flags_of(row))
    word = row["problem"]["question"].split("#")[0]
    page.js(f"(() => {{ const field = document.querySelector('#search'); field.value = {json.dumps(word)}; "
            "field.dispatchEvent(new Event('input')); })()")
    texts = [" ".join([item["problem"]["question"], item["solution"]["text"], item["problem"]["answer"],
                       *(said["text"] for said in item["verifications"])]) for item in rollouts]
    expected = sum(word in text for text in texts)
    page.wait(f"document.querySelector('#found').textContent.startsWith('{expected} of ')")
    page.click("#list [role=option]")
    page.wait("document.querySelector('#rollout h2') !== null")
    address = page.js("location.hash")
    assert "r=" in address
    title, steps = page.text("#rollout h2"), page.texts("#rollout .wrote pre")
    page.driver.refresh()  # the link alone opens it
    page.wait("document.body.dataset.ready === 'true' && document.querySelector('#rollout h2') !== null")
    assert (page.text("#rollout h2"), page.texts("#rollout .wrote pre")) == (title, steps)


@pytest.mark.parametrize("scheme, width", [("light", 1440), ("dark", 1440), ("light", 390)])
def test_pictures_of_its_charts(page, tmp_path, scheme, width):
    page.size(width, 1000)
    page.prefer(scheme)
    page.wait("document.querySelectorAll('#compare .plot.is-drawn').length >= 1")
    page.wait(f"document.documentElement.scrollWidth <= {width}")  # charts follow the window a moment later
    assert page.driver.save_screenshot(str(tmp_path / "charts.png"))
    assert (tmp_path / "charts.png").stat().st_size > 20_000  # an empty page has a few kilobytes
