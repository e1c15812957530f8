"""The report as a reader uses it: in headless Chromium, opened from disk."""

import json
import shutil
import struct
from pathlib import Path
from urllib.parse import quote_plus

import numpy as np
import pytest

from support.report_cases import HOSTILE, run_config, write_run
from tango_jax.notebook.live import inline_page
from tango_jax.rl.algorithms import ALGORITHMS
from tango_jax.tracking.rollout_dump import read_rollouts
from tango_jax.viewer.build import build_bundle, build_page
from tango_jax.viewer.pack import FLAGS, flags_of
from tango_jax.viewer.runs import find_runs

ESCAPE = "\ue00c"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Two arms; that with a verifier has two seeds."""
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "tango" / "0", run_config("tango", 0), hostile=True, evaluated=3)
    two_votes = run_config("tango", 1)
    two_votes.rl.verifications_per_solution = 2
    write_run(folder / "tango" / "1", two_votes)
    write_run(folder / "grpo" / "0", run_config("grpo", 0), turns=5)
    return folder


@pytest.fixture(scope="module")
def rollouts(runs) -> list[dict]:
    """Every dumped rollout in the order of the page, with the name of its run."""
    return [row | {"run": run.name} for run in find_runs([runs])
            for row in read_rollouts(run.rollouts, with_evaluations=True)]


@pytest.fixture(scope="module")
def report(runs, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    build_page(find_runs([runs]), path)
    return path


@pytest.fixture
def page(browser, report):
    """The report, opened anew; afterwards nothing may have been logged."""
    browser.size(1440, 1000)
    browser.prefer("light")
    browser.open(report, "order=training")  # an address about rollouts: their view
    browser.logged()
    yield browser
    assert browser.logged() == []


def key(row: dict) -> str:
    return f"{row['run']}:{row['turn']}:{'e' * (row['role'] == 'evaluation')}{row['row']}"


def in_training(rollouts: list[dict]) -> list[dict]:
    return [row for row in rollouts if row["role"] != "evaluation"]


def found(page) -> int:
    """How many rollouts are listed; the size of the list says it too."""
    count = int(page.text("#found").removeprefix("all ").split()[0].replace(",", ""))
    assert page.js("document.querySelector('#list-space').clientHeight") == 68 * count
    return count


def shown(page) -> dict:
    """What the rollout's page says of itself."""
    page.wait("document.querySelector('#rollout h2') !== null")
    return {"id": page.text("#rollout h2"), "where": page.text("#rollout .where-line")}


def type_search(page, query: str) -> None:
    page.js(f"""(() => {{ const field = document.querySelector('#search'); field.value = {json.dumps(query)};
        field.dispatchEvent(new Event('input')); }})()""")
    page.wait("performance.getEntriesByName('filter').length > 0 && !document.querySelector('#found').textContent"
              ".startsWith('reading')")


# ----------------------------------------------------------------------------------------------- opening and charts


def test_it_opens_with_charts_and_logs_nothing(browser, report, rollouts):
    from selenium.webdriver import ActionChains

    browser.size(1440, 1000)
    browser.open(report)
    assert browser.js("document.body.dataset.view") == "charts"
    assert browser.text("#rollout-count") == str(len(rollouts))
    assert browser.texts("#charts h2") == [
        "Runs compared", "Both roles over training", "Alarms", "The verifier's quality", "Speed"
    ]
    browser.wait("document.querySelectorAll('.plot.is-drawn').length >= 3")
    chart = browser.driver.find_element("css selector", "#compare .nsewdrag")
    ActionChains(browser.driver).move_to_element(chart).perform()  # what is shown there obeys the page's policy too
    browser.wait("document.querySelectorAll('#compare .hoverlayer text').length > 0")
    for name in ("training", "quality", "speed"):
        browser.js(f"document.getElementById('{name}').scrollIntoView({{ behavior: 'instant' }})")
        browser.wait(f"document.querySelectorAll('#{name} .plot.is-drawn').length >= 2")
    assert browser.js("document.querySelectorAll('#compare .plot:first-of-type .scatterlayer .trace').length") >= 2
    # A chart is told in words, and its legend has lines and symbols besides colours.
    assert browser.js("document.querySelector('#compare .plot').ariaLabel").startswith(
        "Generator: accuracy. One seed of each. Greedy."
    )
    told = [f"{mark}{name}, verifications_per_solution={count}" for mark, name, count in (
        ("●", "Tango (trained together)", 1), ("■", "Tango (trained together)", 2), ("▲", "GRPO (no verifier)", 1))]
    assert browser.texts("#compare .curves:first-of-type li")[:3] == told
    assert browser.logged() == []


def test_a_confusion_cell_leads_to_its_rollouts(browser, report, rollouts):
    browser.open(report)
    browser.driver.find_element("css selector", ".confusion td a[href*='false_accept']").click()
    browser.wait("document.body.dataset.view === 'rollouts'")
    rows = [row for row in rollouts if row["run"] == "tango/0" and row["role"] == "generator"]
    assert found(browser) == sum("false_accept" in flags_of(row) for row in rows) > 0
    browser.driver.back()
    browser.wait("document.body.dataset.view === 'charts'")
    assert browser.logged() == []


def test_an_alarm_leads_to_the_rollouts_of_its_turns(browser, report, rollouts):
    """The KL of the made-up verifier is not 0 at its first update, the fourth turn."""
    browser.open(report)
    assert browser.texts("#alarms tbody th") == ["verifier/reference"]
    browser.click("#alarms tbody a")
    browser.wait("document.body.dataset.view === 'rollouts'")
    of_run = [row["turn"] for row in in_training(rollouts) if row["run"] == "tango/0"]
    assert found(browser) == sum(4 <= turn <= 10 for turn in of_run) > 0
    assert browser.logged() == []


def test_another_run_has_other_charts(browser, report):
    browser.open(report)
    assert browser.text(".headline p").startswith("tango/0 · task last_letter · arm tango · seed 0")
    browser.driver.find_element("css selector", "#chart-run option[value='0']").click()
    browser.wait("document.querySelector('.headline p').textContent.startsWith('grpo/0')")
    assert "No rollouts of a verifier" in browser.text("#quality")
    assert browser.text("#alarms p") == "No alarms in 5 turns."


# ------------------------------------------------------------------------------------------------ filters and search


def test_each_filter_lists_what_the_dump_says(page, rollouts):
    for number, name in enumerate(FLAGS, 1):
        expected = sum(name in flags_of(row) for row in rollouts)
        assert expected > 0, name
        chip = f"#chips button:nth-child({number})"
        assert page.text(f"{chip} .count") == str(expected)
        page.click(chip)
        assert found(page) == expected and page.js(f"document.querySelector('{chip}').ariaPressed") == "true"
        page.click(chip)
    assert found(page) == len(rollouts)
    for number in (1, 2):  # any of them
        page.click(f"#chips button:nth-child({number})")
    assert found(page) == sum(bool(flags_of(row) & {"false_accept", "false_reject"}) for row in rollouts)
    page.click("#clear")
    assert found(page) == len(rollouts)


def test_role_grade_run_turns_and_steps(page, rollouts):
    page.click("#more summary")
    page.driver.find_element("css selector", "#role option:nth-child(3)").click()
    assert found(page) == sum(row["role"] == "verifier" for row in rollouts)
    page.driver.find_element("css selector", "#grade option:nth-child(2)").click()
    both = [row for row in rollouts if row["role"] == "verifier" and row["solution"]["is_correct"]]
    assert found(page) == len(both)
    page.click("#clear")
    for name, value in (("turn-from", "3"), ("turn-to", "6"), ("steps-from", "2"), ("steps-to", "4")):
        page.driver.find_element("id", name).send_keys(value)
    ranged = [row for row in rollouts if 3 <= row["turn"] <= 6 and 2 <= len(row["solution"]["steps"]) <= 4]
    assert found(page) == len(ranged)
    page.driver.find_element("css selector", "#run option:nth-child(4)").click()
    assert found(page) == sum(row["run"] == "tango/1" for row in ranged)
    address = page.js("location.hash")
    assert "run=tango/1" in address and "turns=3-6" in address and "steps=2-4" in address
    page.driver.refresh()  # as after the report was written anew
    page.wait("document.body.dataset.ready === 'true'")
    assert found(page) == sum(row["run"] == "tango/1" for row in ranged)


@pytest.mark.parametrize("query", ["KALON", r"\BOXED{INCORRECT}", "größe", '<img src=x onerror="', "no such text", "]"])
def test_search_reads_every_text_whatever_its_case(page, rollouts, query):
    def texts(row):
        return [*(row["problem"][name] for name in ("id", "question", "answer")), row["solution"]["text"],
                *(item["text"] for item in row["verifications"])]

    type_search(page, query)
    expected = [row for row in rollouts if any(query.lower() in text.lower() for text in texts(row))]
    page.wait(f"document.querySelector('#found').textContent.startsWith('{len(expected)} of ')")
    assert found(page) == len(expected)


def test_orders(page, rollouts):
    page.click("#more summary")
    page.driver.find_element("css selector", "#order option[value='advantage']").click()
    strongest = max(abs(value) for row in in_training(rollouts) for _, value, _ in row["advantage"]["total"])
    text = page.text("#option-0 .much")
    assert abs(float(text.replace("−", "-"))) == pytest.approx(strongest, abs=0.006)


# ------------------------------------------------------------------------------------------------------ one rollout


def test_a_link_opens_its_rollout_and_its_arithmetic_is_right(page, report, rollouts):
    row = next(row for row in rollouts if row["role"] == "generator" and row["step_rewards"] not in ([], [None])
               and len(row["step_rewards"][0]) >= 3 and len(set(row["group_rewards"])) == 2)
    page.open(report, f"r={key(row)}")
    assert shown(page)["id"] == row["problem"]["id"]
    assert f"turn {row['turn']} of {row['run']}" in shown(page)["where"]
    steps = row["solution"]["steps"]
    assert len(page.texts("#rollout .step")) == len(steps)
    written = [row["solution"]["text"][start + 6 : end - 7] for start, end in steps]
    assert page.texts("#rollout .wrote pre") == written
    kinds = {True: "good", False: "bad"}
    judged = [kinds[label] for label in row["verifications"][0]["judgements"]]
    assert page.js("[...document.querySelectorAll('#rollout .step')].map((item) => item.classList[1])") == judged
    marks = {"good": "✓ approved", "bad": "✗ rejected"}
    assert page.texts("#rollout .said b") == [marks[kind] for kind in judged]
    mean, std = np.mean(row["group_rewards"]), np.std(row["group_rewards"], ddof=1)
    assert page.texts("#rollout .sums:not(.steps-sums) tr:nth-child(2) td")[0].endswith(
        f": mean {mean:.3f}, std {std:.3f}")
    assert page.texts("#rollout .sums:not(.steps-sums) tr:nth-child(3) td")[0] == ALGORITHMS["grpo"].formula
    assert head_of(page) == ["tokens", f"step reward ±1 / K, K = {len(steps)}", "outcome", "steps", "advantage"]
    cells, (outcome, step) = cells_of(page), row["advantage"]["terms"]
    assert outcome["weight"] + step["weight"] == pytest.approx(1)
    ends = row["solution"]["step_ends"]
    after = ends[-1] + 1
    names = [*(f"end of step {k}" for k in range(1, len(steps) + 1)), "after the last step"]
    rewards = [*map(signed, row["step_rewards"][0]), ""]
    for name, token, reward, shown_cells in zip(names, [*ends, after], rewards, cells, strict=True):
        total = at(row["advantage"]["total"], token)
        parts = [(term["weight"], at(term["runs"], token)) for term in (outcome, step)]
        assert total == pytest.approx(sum(weight * value for weight, value in parts), abs=1e-4)
        products = [f"{weight:.3f} × {signed(value)}" for weight, value in parts]
        assert shown_cells == [name, reward, *products, signed(total)]
    assert at(step["runs"], after) == 0  # no step comes after these tokens


def head_of(page) -> list[str]:
    return page.texts("#rollout .steps-sums thead th")


def cells_of(page) -> list[list[str]]:
    return page.js("[...document.querySelectorAll('.steps-sums tbody tr')].map((tr) => [...tr.children]"
                   ".map((td) => td.textContent))")


def at(runs: list, token: int) -> float:
    values = [value for count, value, *_ in runs for _ in range(count)]
    return values[token]


def signed(value: float) -> str:
    return ("−" if value < 0 else "+") + f"{abs(value):.3f}"


def test_shading_covers_the_tokens_that_it_belongs_to(page, report, rollouts):
    row = next(row for row in in_training(rollouts) if len({value for _, value, _ in row["advantage"]["total"]}) >= 3)
    page.open(report, f"r={key(row)}")
    page.js("document.querySelector('#rollout details').open = true")
    parts = page.js("[...document.querySelectorAll('#rollout .raw')[0].querySelectorAll('.adv')]"
                    ".map((item) => [item.textContent, item.title])")
    text, start, expected = row["solution"]["text"], 0, []
    for _, value, end in row["advantage"]["total"]:
        if value:
            expected.append([text[start:end], f"advantage {signed(value)}"])
        start = end
    assert parts == expected


def test_the_verifiers_own_rollout(page, report, rollouts):
    row = next(row for row in rollouts if row["role"] == "verifier" and row["advantage"]["total"][0][1])
    page.open(report, f"r={key(row)}")
    agrees, written = row["reward"]["terms"]
    assert page.texts("#rollout .sums:not(.steps-sums) tr:first-child td") == [
        f"1 × agreement with the grade {agrees['value']:.3f} + 0.8 × format score {written['value']:.3f}",
        f"{row['reward']['total']:.3f}",
    ]
    (term,), total = row["advantage"]["terms"], row["advantage"]["total"][0][1]
    assert total == pytest.approx(term["weight"] * term["runs"][0][1], abs=1e-4)
    assert head_of(page) == ["tokens", "outcome, by the weight of its class", "advantage"]
    product = f"{term['weight']:.3f} × {signed(term['runs'][0][1])}"
    assert cells_of(page) == [["every token", product, signed(total)]]
    assert page.js("document.querySelector('#rollout .wrote .adv')") is None  # its tokens are the verifier's


@pytest.fixture(scope="module")
def own_reward_run(tmp_path_factory) -> Path:
    """A run in which functions of the user's take part in the rewards of both roles, with weights of their own."""
    config = run_config("tango", 3)
    config.generator.rewards, config.verifier.rewards = (f"/home/me/{HOSTILE_FILE}:brevity",), ("my.rewards:care",)
    config.generator.reward_weights = (0.25,)
    config.rl.outcome_weight, config.rl.format_weight = 0.0, 0.5
    return write_run(tmp_path_factory.mktemp("own") / "own", config)


HOSTILE_FILE = "a<b>\u202e.py"


@pytest.mark.parametrize("role, name", [("generator", "a<b>\\u202e.py:brevity"), ("verifier", "my.rewards:care")])
def test_an_own_reward_is_a_part_of_the_sum(browser, own_reward_run, tmp_path, role, name):
    build_page(find_runs([own_reward_run]), tmp_path / "report.html")
    rows = [row for row in read_rollouts(own_reward_run / "rollouts") if row["role"] == role]
    row = max(rows, key=lambda row: (row["reward"]["terms"][0]["value"], row["reward"]["total"]))
    *_, own = row["reward"]["terms"]
    assert own["value"] != 0
    browser.open(tmp_path / "report.html", f"r=own:{row['turn']}:{row['row']}")
    browser.wait("document.querySelector('#rollout h2') !== null")
    left, total = browser.texts("#rollout .sums:not(.steps-sums) tr:first-child td")
    assert total == f"{row['reward']['total']:.3f}".replace("-", "−")
    assert left.endswith(f" + {own['weight']:g} × own reward ({name}) {own['value']:.3f}".replace("-", "−"))
    weights = {"generator": ("0 × grade ", " + 0.5 × format score "),
               "verifier": ("1 × agreement with the grade ", " + 0.8 × format score ")}[role]
    assert left.startswith(weights[0]) and weights[1] in left
    assert browser.logged() == []


def invented_credit(_, is_action_BT) -> tuple:
    """Three terms of names of their own, of which one has a weight for every row; the total is none of their sums."""
    B, T = is_action_BT.shape
    rise_BT = np.tile(np.arange(T, dtype=np.float32), (B, 1))
    row_B = np.arange(B, dtype=np.float32)
    terms = {"rise <b>": (row_B / 8, rise_BT), "patience": (-2.5, np.ones((B, T), np.float32)), "luck": (0.0, -rise_BT)}
    return terms, 7 * is_action_BT + rise_BT


def credit_of_no_terms(_, is_action_BT) -> tuple:
    return {}, 0.25 * is_action_BT


def test_an_invented_credit_is_shown_with_its_own_numbers(browser, tmp_path):
    write_run(tmp_path / "runs" / "own", turns=4, credit_fn=invented_credit)
    write_run(tmp_path / "runs" / "bare", turns=1, credit_fn=credit_of_no_terms)
    build_page(find_runs([tmp_path / "runs"]), tmp_path / "report.html")
    rows = [row for row in read_rollouts(tmp_path / "runs" / "own" / "rollouts") if row["row"] == 3]
    solved = next(row for row in rows if row["role"] == "generator" and len(row["solution"]["step_ends"]) > 1)
    browser.open(tmp_path / "report.html", f"r=own:{solved['turn']}:3")
    browser.wait("document.querySelector('#rollout h2') !== null")
    assert head_of(browser) == ["tokens", "rise <b>", "patience", "luck", "advantage"]
    ends = solved["solution"]["step_ends"]
    for k, (cells, token) in enumerate(zip(cells_of(browser)[: len(ends)], ends, strict=True), 1):
        assert cells == [f"end of step {k}", f"0.375 × {signed(token)}", "−2.500 × +1.000",
                         f"0.000 × {signed(-token)}", signed(7 + token)]
    judged = next(row for row in rows if row["role"] == "verifier")  # whose tokens have no steps: one row a run
    browser.open(tmp_path / "report.html", f"r=own:{judged['turn']}:3")
    browser.wait("document.querySelector('#rollout h2') !== null")
    cells = cells_of(browser)
    assert cells[2] == ["token 3", "0.375 × +2.000", "−2.500 × +1.000", "0.000 × −2.000", "+9.000"]
    assert len(cells) == 24 and f"The first 24 of {judged['verifications'][0]['tokens']}." in browser.text("#rollout")
    browser.open(tmp_path / "report.html", "r=bare:1:0")
    browser.wait("document.querySelector('#rollout h2') !== null")
    assert head_of(browser) == ["tokens", "advantage"] and cells_of(browser) == [["every token", "+0.250"]]
    assert browser.logged() == []


def test_a_second_try_and_a_second_judgement_stand_beside_the_first(browser, tmp_path):
    folder = write_run(tmp_path / "runs" / "twice", turns=4)
    for path in sorted((folder / "rollouts").glob("*.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            if row["role"] == "generator":
                again = row["solution"] | {"text": "<b>once more</b>", "is_correct": True, "after_verdict": "INCORRECT"}
                row["second_try"] = again | {"reward": {"total": 1.25, "terms": []}, "advantage": None}
            else:
                row["second_judgement"] = row["verifications"][0] | {
                    "text": "<i>of itself</i>", "verdict": "INCORRECT", "judgements": [True, False, True]}
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    build_page(find_runs([tmp_path / "runs"]), tmp_path / "report.html")
    shown = {}
    for turn in (1, 4):
        browser.open(tmp_path / "report.html", f"r=twice:{turn}:0")
        browser.wait("document.querySelector('#rollout h2') !== null")
        shown[turn] = browser.text("#rollout .further")
    assert "Second try, after the verdict INCORRECT" in shown[1] and "Answer is right" in shown[1]
    assert "reward 1.25" in shown[1] and "<b>once more</b>" in shown[1]
    assert "judged once more" in shown[4] and "Verdict INCORRECT" in shown[4]
    assert "accepts 2 of 3 remarks" in shown[4] and "<i>of itself</i>" in shown[4]
    assert browser.logged() == []


def test_each_of_several_verifications_can_be_read(page, report, rollouts):
    row = next(row for row in rollouts if row["run"] == "tango/1" and row["role"] == "generator"
               and len({item["verdict"] for item in row["verifications"]}) == 2)
    page.open(report, f"r={key(row)}")
    for number, item in enumerate(row["verifications"], 1):
        page.driver.find_element("css selector", f"#rollout select option:nth-child({number})").click()
        assert f"Verdict {item['verdict']}" in page.text("#rollout .banner")
    assert page.js("document.activeElement.tagName") == "SELECT"


def test_a_misaligned_verification_says_so(page, report, rollouts):
    row = next(row for row in rollouts if "misaligned" in flags_of(row) and row["role"] == "generator"
               and row["solution"]["steps"] and row["verifications"][0]["blocks"])
    page.open(report, f"r={key(row)}")
    assert "misaligned" in page.text("#rollout .banner")
    assert set(page.texts("#rollout .said b")) == {"– not judged"}
    assert "No step has a reward: no labels match the steps." in page.text("#rollout")


def test_a_solution_without_steps_says_so_and_an_invalid_verdict_is_named_once(browser, tmp_path):
    folder = write_run(tmp_path / "runs" / "one", turns=1)
    (path,) = (folder / "rollouts").glob("*.jsonl")
    row, *others = map(json.loads, path.read_text().splitlines())
    row["solution"] |= {"steps": [], "step_ends": [], "gold_steps": []}
    row["verifications"][0] |= {"verdict": "INVALID", "is_aligned": False, "judgements": [], "blocks": []}
    row["step_rewards"] = [None]
    path.write_text("".join(json.dumps(one) + "\n" for one in (row, *others)))
    build_page(find_runs([tmp_path / "runs"]), tmp_path / "report.html")
    browser.open(tmp_path / "report.html", "r=one:1:0")
    browser.wait("document.querySelector('#rollout h2') !== null")
    assert "The solution has no steps to judge" in browser.text("#rollout .steps")
    assert browser.text("#rollout .banner").count("INVALID") == 1
    assert browser.logged() == []


def test_model_text_is_never_markup(page, report):
    page.open(report, "r=tango/0:1:0")
    shown_text = HOSTILE.replace("\u2028", "\\u2028")
    assert page.text("#rollout .problem pre") == shown_text
    assert page.texts("#rollout .wrote pre") == [shown_text]
    assert page.text("#rollout .between pre") == "\U0001f600\\u202e<think>"
    assert page.text("#rollout .between .escape") == "\\u202e"  # unlike a backslash that was written
    assert page.js("document.querySelectorAll('img, #rollout script').length") == 0


def test_the_policy_blocks_what_is_not_the_pages_own(page, report):
    """Markup and scripts that are put into the page, as if some text had got through, do nothing."""
    page.js("""(() => { window.violated = [];
        document.addEventListener('securitypolicyviolation', (event) => violated.push(event.effectiveDirective));
        const box = document.createElement('div');
        box.innerHTML = '<img src=x onerror="window.ran = 1"><a id="bad" href="javascript:window.ran = 2">a</a>'
          + '<p style="position: fixed">p</p><form action="x"></form>';
        const script = document.createElement('script');
        script.textContent = 'window.ran = 3';
        document.body.append(box, script);
        box.querySelector('#bad').click(); })()""")
    page.wait("violated.length >= 4")
    assert set(page.js("violated")) >= {"img-src", "script-src-attr", "style-src-attr", "script-src-elem"}
    assert page.js("window.ran ?? null") is None and page.js("document.querySelector('p[style]').style.position") == ""
    assert len(page.logged()) >= 4


def test_the_report_inside_a_notebook(browser, report, tmp_path):
    """In its frame the charts draw, and a link leads to rollouts instead of to the notebook."""
    (tmp_path / "cell.html").write_text(f"<!doctype html><meta charset=utf-8>{inline_page(report).data}", "utf-8")
    browser.driver.get(f"file://{tmp_path}/cell.html")
    browser.driver.switch_to.frame(0)
    browser.wait("document.querySelectorAll('.plot.is-drawn').length >= 1")
    browser.click(".confusion td a[href*='false_accept']")
    browser.wait("document.body.dataset.view === 'rollouts'")
    assert browser.js("location.href").startswith("about:srcdoc#only=false_accept")
    browser.driver.switch_to.default_content()
    assert browser.logged() == []


def test_a_link_to_a_rollout_that_is_not_there_says_so(page, report):
    page.open(report, "r=tango/0:99:0")
    assert page.js("!document.querySelector('#problem').hidden")
    assert page.text("#problem").startswith("This report does not contain the rollout tango/0:99:0")
    page.press("j")  # on to another one
    page.wait("document.querySelector('#problem').hidden")
    page.open(report, "run=grpo/9")
    assert found(page) == 0


def test_links_to_a_run_whose_folder_has_signs_of_addresses_in_its_name(page, tmp_path):
    write_run(tmp_path / "lr+kl a&b=c#d%41", run_config(groups=1), turns=2)
    [run] = find_runs([tmp_path])
    build_page([run], tmp_path / "report.html")
    row = next(row | {"run": run.name} for row in read_rollouts(run.rollouts))
    page.open(tmp_path / "report.html", f"r={quote_plus(key(row))}")
    links = page.js("[location.href, document.querySelector('.group a').href]")
    page.click("#look-group")
    page.wait("document.querySelector('.column.chosen') !== null")
    links.append(page.js("document.querySelector('.column.chosen h3 a').href"))
    for link in links:
        page.open(tmp_path / "report.html", link.partition("#")[2])
        assert page.js("document.querySelector('#problem').hidden"), link
        assert shown(page)["id"] == row["problem"]["id"]


def test_the_run_filter_finds_a_folder_with_two_blanks_in_its_name(page, tmp_path):
    for seed in range(2):
        write_run(tmp_path / f"lr  {seed}", run_config(seed=seed, groups=1), turns=2)
    built = build_page(find_runs([tmp_path]), tmp_path / "report.html")
    page.open(tmp_path / "report.html")
    page.click("#tab-rollouts")
    page.click("#more summary")
    page.driver.find_element("css selector", "#run option:nth-child(2)").click()
    assert found(page) == built.rollouts // 2


# ----------------------------------------------------------------------------------------------- keys and appearance


def test_keys_alone_are_enough(page, rollouts):
    def here() -> str:
        return page.js("new URLSearchParams(location.hash.slice(1)).get('r')")

    page.press("j", "j")
    page.wait(f"location.hash.includes('{key(rollouts[2])}')")
    page.wait(f"document.querySelector('#rollout h2').textContent === '{rollouts[2]['problem']['id']}'")
    assert page.js("document.activeElement.id") == "list"  # where it is heard
    page.press("k")
    assert here() == key(rollouts[1])
    page.press("]", "]")
    assert here() == key(rollouts[3])
    page.press("]")  # the group ends here
    assert here() == key(rollouts[3])
    page.press("\ue010")  # End
    assert here() == key(rollouts[-1])
    page.press("1")
    assert found(page) == sum("false_accept" in flags_of(row) for row in rollouts)
    page.press("0")
    assert found(page) == len(rollouts)
    page.press("/")
    assert page.js("document.activeElement.id") == "search"
    page.press("j1?")  # letters, not commands
    page.wait("document.querySelector('#found').textContent.startsWith('0 of')")
    page.press(ESCAPE)
    page.press("0")
    page.wait("document.querySelector('#found').textContent.startsWith('all')")
    page.press("?")
    assert page.js("document.querySelector('#help').open")
    page.press(ESCAPE)
    page.wait("!document.querySelector('#help').open && document.activeElement === document.body")
    page.press("c")
    assert page.js("document.body.dataset.view") == "charts"


def test_the_list_says_where_one_is(page, rollouts):
    page.press("j")
    assert page.js("document.querySelector('#list').getAttribute('aria-activedescendant')") == "option-1"
    option = "document.querySelector('#option-1')"
    assert page.js(f"{option}.ariaSelected") == "true" and page.js(f"{option}.ariaPosInSet") == "2"
    assert page.js(f"{option}.ariaSetSize") == str(len(rollouts))
    assert page.js("document.querySelectorAll('#list [role=option]').length") < 40  # the others are not made


def png_size(data: bytes) -> tuple[int, int]:
    return struct.unpack(">II", data[16:24])


@pytest.mark.parametrize("scheme, width, brightness", [("light", 1440, 200), ("dark", 1440, 60), ("light", 390, 200)])
def test_light_dark_and_narrow(page, report, rollouts, tmp_path, scheme, width, brightness):
    row = next(row for row in rollouts if "false_accept" in flags_of(row))
    page.size(width, 900)
    page.prefer(scheme)
    page.open(report, f"r={key(row)}")
    picture = tmp_path / f"{scheme}_{width}.png"
    page.driver.save_screenshot(str(picture))
    assert png_size(picture.read_bytes()) == (width, 900)
    channels = page.js("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (min(channels) > brightness) if scheme == "light" else (max(channels) < brightness)
    assert page.js("document.documentElement.scrollWidth") <= width  # nothing to scroll sideways
    side, rollout = (page.js(f"document.querySelector('{name}').getBoundingClientRect().top")
                     for name in (".side", "#rollout"))
    assert (rollout > side) == (width < 900)


def test_charts_of_runs_with_long_names_fit_a_narrow_page(page, runs, tmp_path):
    for start in "01":
        shutil.copytree(runs, tmp_path / "runs" / f"{'words=12,prompts=12,' * 5}data_seed={start}")
    build_page(find_runs([tmp_path / "runs"]), tmp_path / "report.html")
    page.size(390, 900)
    page.open(tmp_path / "report.html")
    assert page.js("document.querySelector('#chart-run').options[0].text.length") > 100
    assert page.js("document.documentElement.scrollWidth") <= 390
    ends = page.js("[...document.querySelectorAll('caption')].map((one) => one.getBoundingClientRect().right)")
    assert ends and max(ends) <= 390  # whatever the width of their tables


# ------------------------------------------------------------------------------------------------ lists and searches


def first_rows(page, count: int) -> list[list[str]]:
    """[where it is from, what was wrong] of the first rows of the list."""
    rows = page.js("[...document.querySelectorAll('#list [role=option]')].map((row) => "
                   "[row.querySelector('.where').textContent, row.querySelector('.wrong').textContent])")
    return rows[:count]


def test_the_latest_come_first_and_each_row_says_what_was_wrong(page, report, rollouts):
    page.open(report, "order=")
    last = max(row["turn"] for row in rollouts)
    of_last = [row for row in rollouts if row["turn"] == last]
    rows = first_rows(page, 3)
    assert [where.split(" · ")[0] for where, _ in rows] == [f"turn {last}"] * 3
    for (where, wrong), row in zip(rows, of_last, strict=False):
        assert where == f"turn {last} · {row['role']} · row {row['row']} · {row['run']}"
        assert set(filter(None, wrong.split(", "))) == labels_of(row)


def labels_of(row: dict) -> set[str]:
    return {part for name in flags_of(row) for part in FLAGS[name][0].split(", ")}


def test_the_worst_come_first(page, report, rollouts):
    page.open(report, "order=worst")
    assert all("false accept" in wrong for _, wrong in first_rows(page, 5))
    page.js("document.querySelector('#list').scrollTop = 1e9")
    page.wait("document.querySelector('#list [role=option]:last-child .wrong').textContent === ''")


def test_a_problem_is_found_by_its_id(page, rollouts):
    first = rollouts[len(rollouts) // 2]["problem"]["id"]  # made/<turn>/<number>
    for query in (first, first.upper()):
        type_search(page, f"id:{query}")
        expected = sum(row["problem"]["id"] == first for row in rollouts)
        page.wait(f"document.querySelector('#found').textContent.startsWith('{expected} of ')")
    type_search(page, "id: held_out")  # no id ends in it: all that contain it
    expected = sum("held_out" in row["problem"]["id"] for row in rollouts)
    page.wait(f"document.querySelector('#found').textContent.startsWith('{expected} of ')")
    assert page.js("document.querySelector('#nothing').hidden")
    type_search(page, "id:no such id")
    page.wait("document.querySelector('#found').textContent.startsWith('0 of ')")
    assert page.text("#nothing").startswith("Nothing matches")
    assert not page.js("document.querySelector('#nothing').hidden")


# ------------------------------------------------------------------------------------------------------ side by side


def column_texts(page) -> list[dict]:
    return page.js("""[...document.querySelectorAll('.column')].map((column) => ({
        where: column.querySelector('h3').textContent, reward: column.querySelector('.num').textContent,
        run: column.querySelector('small')?.textContent, steps: column.querySelectorAll('.step').length,
        chosen: column.classList.contains('chosen') }))""")


def test_the_samples_of_a_group_side_by_side(page, report, rollouts):
    row = next(row for row in rollouts if row["role"] == "generator" and row["run"] == "tango/0" and row["turn"] > 1
               and len(set(row["group_rewards"])) == 2)
    page.open(report, f"r={key(row)}")
    assert page.text("#look-group") == "Its group (4)"
    page.press("g")
    page.wait("document.querySelectorAll('.column').length === 4")
    columns = column_texts(page)
    rewards = sorted(row["group_rewards"], reverse=True)
    shown = [float(column["reward"].split("reward ")[1].split()[0]) for column in columns]
    assert shown == rewards and sum(column["chosen"] for column in columns) == 1
    assert columns[0]["reward"].endswith(" best") and columns[-1]["reward"].endswith(" worst")
    assert "as=group" in page.js("location.hash")
    page.click(".column:last-child h3 a")  # one of them in full
    page.wait("document.querySelectorAll('.column').length === 0 && document.querySelector('#rollout .sums') !== null")
    assert "as=" not in page.js("location.hash")


def test_what_a_run_said_of_a_problem_before_and_after(page, report, rollouts):
    """Three held-out problems, at the evaluations after turns 1, 5 and 9."""
    row = next(row for row in rollouts if row["role"] == "evaluation")
    page.open(report, f"r={key(row)}")
    assert shown(page)["where"].startswith("after turn 1 of tango/0 · evaluation")
    assert "no reward, and no update" in page.text("#rollout")
    page.click("#look-problem")
    page.wait("document.querySelectorAll('.column').length === 3")
    where = [column["where"] for column in column_texts(page)]
    assert where == [f"after turn {turn}, evaluation" for turn in (1, 5, 9)]
    page.driver.refresh()
    page.wait("document.querySelectorAll('.column').length === 3")
    page.press("p")
    page.wait("document.querySelectorAll('.column').length === 0")


def test_a_problem_across_runs(page, report, rollouts):
    """Two runs of the same seed see the same problem in their first turn, with four samples each."""
    row = next(row for row in rollouts if row["problem"]["id"] == "made/0/1" and row["run"] == "tango/0")
    same = [other for other in rollouts
            if (other["problem"]["id"], other["problem"]["question"]) == ("made/0/1", row["problem"]["question"])]
    page.open(report, f"r={key(row)}&as=problem")
    page.wait(f"document.querySelectorAll('.column').length === {len(same)}")
    assert {column["run"] for column in column_texts(page)} == {other["run"] for other in same} == {"tango/0", "grpo/0"}


# ---------------------------------------------------------------------------------------------------------- folders


@pytest.mark.long
def test_a_bundle_is_opened_from_disk(browser, runs, rollouts, tmp_path):
    build_bundle(find_runs([runs]), tmp_path / "report")
    row = rollouts[-1]
    browser.open(tmp_path / "report" / "index.html", f"r={key(row)}")
    browser.wait("document.querySelector('#rollout h2') !== null")
    assert browser.text("#rollout h2") == row["problem"]["id"]
    word = row["problem"]["question"].split()[-1]
    type_search(browser, word)
    expected = sum(word in json.dumps(row) for row in rollouts)
    browser.wait(f"document.querySelector('#found').textContent.startsWith('{expected} of ')")
    assert browser.logged() == []
