"""The report without a browser: which runs it finds, what it counts, what it leaves out, and that the page is whole."""

import base64
import gzip
import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from support.paths import ROOT
from support.processes import HANG_S
from support.report_cases import HOSTILE, run_config, write_run
from tango_jax.config import default_config, flatten
from tango_jax.report import main, parse
from tango_jax.tracking.curves import Series
from tango_jax.tracking.metrics import read_metrics
from tango_jax.tracking.rollout_dump import read_rollouts
from tango_jax.viewer import charts, pack, panels
from tango_jax.viewer.build import SCRIPTS, _facts, build_bundle, build_page
from tango_jax.viewer.runs import Run, find_runs

T, F = True, False


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "one", hostile=True)


def decoded(text: str) -> str:
    return gzip.decompress(base64.b64decode(text)).decode()


def payload(page: str, name: str) -> str:
    return decoded(re.search(rf'<script type="text/plain" id="data-{name}">(.*?)</script>', page)[1])


def rollouts_in(page: str) -> list[dict]:
    """As the page's own script puts them together."""
    found = []
    for number in range(page.count('id="data-chunk-')):
        lines = payload(page, f"chunk-{number}").split("\n")
        half = len(lines) // 2
        for texts, rest in zip(lines[:half], lines[half:], strict=True):
            row = json.loads(rest)
            row["problem"]["id"], row["problem"]["question"], row["problem"]["answer"], *written = json.loads(texts)
            row["solution"]["text"], *verifications = written
            for item, text in zip(row["verifications"], verifications, strict=True):
                item["text"] = text
                del item["told"]  # what the page says of it
            found.append(row)
    return found


# ------------------------------------------------------------------------------------------------------------- runs


def test_runs_are_found_and_named_by_their_place(tmp_path, run_folder):
    for arm in ("tango", "grpo"):
        for seed in (0, 1):
            write_run(tmp_path / "abl" / arm / f"seed_{seed}", run_config(arm, seed, groups=1), turns=2)
    runs = find_runs([tmp_path / "abl"])
    assert [(run.name, run.arm) for run in runs] == [
        ("grpo/seed_0", "grpo"), ("grpo/seed_1", "grpo"), ("tango/seed_0", "tango"), ("tango/seed_1", "tango")
    ]
    assert find_runs([run_folder])[0].name == "one"
    assert len(find_runs([tmp_path / "abl", tmp_path / "abl" / "grpo"])) == 4  # none twice


def test_a_run_that_is_still_writing_is_read_up_to_its_last_whole_line(run_folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run_folder, copy)
    (copy / "summary.json").unlink()
    with open(copy / "metrics.jsonl", "a") as file:
        file.write('{"step": 99, "ph')
    (run,) = find_runs([copy])
    assert not run.is_finished and run.rows[-1]["step"] < 99


@pytest.mark.parametrize("argv, message", [
    ([], "no run is named"),
    (["{run}", "--ou=x"], r"unknown argument '--ou=x'; did you mean --out\? --help shows the usage"),
    (["{run}", "--rollouts=many"], "argument --rollouts: invalid int value: 'many'"),
    (["{run}", "--watch=soon"], "argument --watch: invalid float value: 'soon'"),
    (["{run}", "--watch=-1"], "--watch=-1.0 must lie between 0.0 and 86400.0"),
    (["{run}", "--watch=nan"], "--watch=nan must lie between"),
    (["{run}", "--rollouts=-1"], "--rollouts=-1 must be at least 0"),
    (["{run}", "--out={run}"], "is a folder; name a file in it"),
    (["{run}", "--out=new/"], "--out=new/ is a folder; name a file in it, or write a folder with --bundle"),
    (["{run}", "--bundle=x/report.html"], "--bundle=x/report.html is the name of a page, and a bundle is a folder"),
    (["{run}", "--out=x", "--bundle=y"], "--out=x and --bundle=y: give one of them"),
    (["{run}", "--bundle={run}/config.json"], "is a file; name a folder"),
    (["{run}", "--as_seed=task.dataseed"], r"unknown setting task.dataseed; did you mean task\.data_seed\?"),
    (["{run}/rollouts"], r"rollouts holds no run with metrics .*: give the --workdir of python -m tango_jax\.train"),
])
def test_mistakes_end_in_one_line(run_folder, argv, message):
    with pytest.raises(SystemExit) as stopped:
        main([argument.format(run=run_folder) for argument in argv])
    assert re.search(f"^error: .*{message}", str(stopped.value)) and "\n" not in str(stopped.value)


def test_the_command_line(run_folder):
    whole = ["a", "b", "--out=x/y.html", "--rollouts=5", "--watch=60", "--as_seed=task.data_seed,rl.gamma"]
    assert parse(whole) == (["a", "b"], Path("x/y.html"), False, 5, 60.0, ("task.data_seed", "rl.gamma"))
    assert parse(["a", "--watch=5", "b"]).runs == ["a", "b"]
    assert parse(["a"]) == (["a"], Path("report.html"), False, 20_000, 0.0, ())
    for name, written in (("x/y", "x/y.html"), ("v1.2", "v1.2.html"), ("y.htm", "y.htm")):
        assert parse(["a", f"--out={name}"]).out == Path(written)
    assert parse(["a", "--bundle=x"]) == (["a"], Path("x"), True, None, 0.0, ())


def test_the_command_writes_the_page_and_says_what_is_in_it(run_folder, tmp_path):
    out = tmp_path / "new" / "report.html"
    command = [sys.executable, "-m", "tango_jax.report", str(run_folder), f"--out={out}", "--rollouts=20"]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    said = re.search(r"runs 1, rollouts (\d+) \((\d+) more left out; --bundle=DIR holds all\), ", done.stdout)
    kept, left_out = map(int, said.groups())
    assert kept <= 20 and kept + left_out == 160 and kept % 4 == 0
    assert out.read_text().startswith("<!doctype html>") and list(out.parent.iterdir()) == [out]


def test_watching_goes_on_until_the_run_is_finished(run_folder, tmp_path, monkeypatch, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(run_folder, copy)
    (copy / "summary.json").unlink()
    naps = []

    def sleep(seconds):
        naps.append(seconds)
        if len(naps) == 2:
            (copy / "summary.json").write_text("{}")

    monkeypatch.setattr("tango_jax.report.time.sleep", sleep)
    main([str(copy), f"--out={tmp_path / 'report.html'}", "--watch=60"])
    assert naps == [60.0, 60.0] and capsys.readouterr().out.count("rollouts 160") == 3


# ---------------------------------------------------------------------------------------------------------- the page


def test_the_page_holds_every_rollout_as_it_was_dumped(run_folder, tmp_path):
    built = build_page(find_runs([run_folder]), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    dumped = list(read_rollouts(run_folder / "rollouts"))
    assert rollouts_in(page) == dumped
    assert (built.rollouts, built.rollouts_dumped, built.size) == (160, 160, len(page.encode()))
    columns = json.loads(payload(page, "columns"))
    assert columns["turn"] == [row["turn"] for row in dumped]
    assert [columns["labels"][i] for i in columns["label"]][0] == HOSTILE.replace("\u2028", "").strip()


def test_a_page_of_the_users_is_not_replaced(run_folder, tmp_path):
    out = tmp_path / "index.html"
    build_page(find_runs([run_folder]), out)
    build_page(find_runs([run_folder]), out)  # its own it may
    out.write_text("<html>mine</html>")
    with pytest.raises(ValueError, match=r"--out=.*index\.html is no report and would be overwritten; name another"):
        build_page(find_runs([run_folder]), out)
    assert out.read_text() == "<html>mine</html>"


def test_the_page_asks_for_nothing_from_a_network(run_folder, tmp_path):
    build_page(find_runs([run_folder]), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert not re.search(r"(?:src|href)=[\"'](?!#|data:)", page.replace("`", '"'))
    assert not re.search(r"\bfetch\(|XMLHttpRequest|@import|url\(", page)
    assert page.count("<script") == page.count("</script>")  # nothing of the model's text stands in the markup
    assert "onerror=alert" not in page and "<!--" not in page


def test_the_policy_names_the_pages_own_parts_and_nothing_else(run_folder, tmp_path):
    build_page(find_runs([run_folder]), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")

    def source(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    head = page[: page.index("<link")]  # before anything that it is about
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', head)
    given = {name: values.split() for name, _, values in (part.partition(" ") for part in policy.split("; "))}
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    assert given == {
        "default-src": ["'none'"],
        "script-src": [source(text) for text in (*scripts, payload(page, "plotly"))],
        "style-src": [source(style), source("")],
        "img-src": ["data:"],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
    }
    assert len(scripts) == 1 and not re.search(r"\beval\(|new Function|innerHTML|insertAdjacent|\.write\(", scripts[0])
    # What hashes do not allow: handlers and styles in attributes, in the page or made by its script.
    markup = re.sub(r"<(script|style)[ >].*?</\1>", "", page, flags=re.DOTALL)
    assert not re.search(r"<[^>]*\s(?:on\w+|style)\s*=", markup)
    assert not re.search(r"setAttribute\(\s*[\"'](?:style|on)", scripts[0])


def test_model_text_cannot_end_its_element(tmp_path):
    """Whatever a rollout holds, the payloads are base64, and every script element is one of the page's own."""
    folder = write_run(tmp_path / "run", run_config(groups=1), turns=1)
    (path,) = (folder / "rollouts").glob("*.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for text in ("</script><script>alert(1)</script>", "<!--<script>", "]]>\x00\ud800", "<base href=//evil>"):
        rows[0]["solution"]["text"] = rows[0]["problem"]["question"] = rows[0]["problem"]["id"] = text
        rows[0]["verifications"][0]["text"] = rows[0]["problem"]["answer"] = text
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        build_page(find_runs([folder]), tmp_path / "report.html")
        page = (tmp_path / "report.html").read_text(encoding="utf-8")
        assert text not in page and "alert(1)" not in page and "<!--" not in page and "<base" not in page
        payloads = re.findall(r'<script type="text/plain" id="data-[\w-]+">([^<]*)</script>', page)
        assert len(payloads) + 1 == page.count("<script") == page.count("</script>")
        assert all(re.fullmatch(r"[A-Za-z0-9+/=]+", value) for value in payloads)
        assert rollouts_in(page)[0]["problem"]["question"] == text.replace("\ud800", "?")


def test_a_folder_of_any_name_has_its_report(run_folder, tmp_path):
    shutil.copytree(run_folder, tmp_path / "a\udcff\u202e<b>")  # bytes that are no text, and letters turned around
    (run,) = find_runs([tmp_path / "a\udcff\u202e<b>"])
    build_page([run], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<title>RL Tango: a\\udcff\\u202e&lt;b&gt;</title>" in page


def test_the_same_runs_give_the_same_page(run_folder, tmp_path):
    for name in ("a.html", "b.html"):
        build_page(find_runs([run_folder]), tmp_path / name)
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_beyond_the_size_limit_whole_groups_are_left_out_evenly(run_folder, tmp_path):
    runs = find_runs([run_folder])
    whole = build_page(runs, tmp_path / "whole.html")
    page = (tmp_path / "whole.html").read_text()
    chunks = sum(len(value) for value in re.findall(r'id="data-chunk-\d+">(.*?)<', page))
    limit = whole.size - chunks // 2
    built = build_page(runs, tmp_path / "half.html", max_bytes=limit)
    assert built.size <= limit and 40 < built.rollouts < 100
    kept = rollouts_in((tmp_path / "half.html").read_text())
    groups = [(row["turn"], row["group"]) for row in kept]
    assert all(groups.count(group) == 4 for group in groups)
    assert {row["turn"] for row in kept} >= {2, 5, 9}
    assert build_page(runs, tmp_path / "none.html", max_bytes=1000).rollouts == 0


# --------------------------------------------------------------------------------------------------------- a folder


def rollouts_of_bundle(folder: Path) -> list[dict]:
    page = (folder / "index.html").read_text()
    assert 'id="data-chunk-' not in page
    chunks = [(folder / "data" / name).read_text() for name in json.loads(payload(page, "columns"))["files"]]
    found = [re.fullmatch(r'tangoChunk\("(chunk-\w+\.js)", "([A-Za-z0-9+/=]+)"\);\n', chunk)[2] for chunk in chunks]
    made = "".join(f'<script type="text/plain" id="data-chunk-{i}">{chunk}</script>' for i, chunk in enumerate(found))
    return rollouts_in(made)


def test_a_bundle_holds_every_rollout_in_files_beside_its_page(tmp_path, run_folder, capsys, monkeypatch):
    monkeypatch.setattr("tango_jax.viewer.build.BUNDLE_CHUNK", 48)
    main([str(run_folder), f"--bundle={tmp_path / 'report'}"])
    assert "report/index.html: runs 1, rollouts 160, " in capsys.readouterr().out
    assert rollouts_of_bundle(tmp_path / "report") == list(read_rollouts(run_folder / "rollouts"))
    names = sorted(path.name for path in (tmp_path / "report" / "data").iterdir())
    assert len(names) == 4  # 160 by 48
    page = (tmp_path / "report" / "index.html").read_text()
    policy = re.search('Content-Security-Policy" content="([^"]*)"', page)[1]
    assert re.search(r"script-src ('sha256-[\w+/=]+' ){2}'self';", policy)
    # Written anew with fewer rollouts: files that are not needed any more are gone, others are as they were.
    built = build_bundle(find_runs([run_folder]), tmp_path / "report", 100)
    kept = rollouts_of_bundle(tmp_path / "report")
    assert built.rollouts == len(kept) <= 100 and built.rollouts_dumped == 160
    assert {path.name for path in (tmp_path / "report" / "data").iterdir()} == set(
        json.loads(payload((tmp_path / "report" / "index.html").read_text(), "columns"))["files"])


def test_a_bundle_never_takes_the_place_of_another_page(tmp_path, run_folder):
    (tmp_path / "index.html").write_text("<h1>my own page</h1>")
    with pytest.raises(SystemExit, match="its index.html is no report and would be overwritten; name another folder"):
        main([str(run_folder), f"--bundle={tmp_path}"])
    assert (tmp_path / "index.html").read_text() == "<h1>my own page</h1>"


def test_a_run_without_rollouts_has_its_charts(tmp_path):
    folder = write_run(tmp_path / "run", turns=9)
    shutil.rmtree(folder / "rollouts")
    built = build_page(find_runs([folder]), tmp_path / "report.html")
    content = json.loads(payload((tmp_path / "report.html").read_text(), "charts-0"))
    assert built.rollouts == 0 and content["quality"]["confusion"] == []
    assert [content[name][0]["title"] for name in ("training", "speed")] == ["Generator", "Seconds per turn"]
    assert content["quality"]["panels"][0]["title"] == "Verifier on the fixed pool"


def test_the_verifier_is_judged_by_the_generators_turns(run_folder, tmp_path):
    build_page(find_runs([run_folder]), tmp_path / "report.html")
    content = json.loads(payload((tmp_path / "report.html").read_text(), "charts-0"))
    turns = [1, 2, 3, 5, 6, 7, 9, 10]  # every fourth is the verifier's
    (bars, *_) = (item["traces"] for item in content["quality"]["panels"]
                if item["title"] == "Disagreements with the grader")
    assert bars[0]["x"] == turns
    table, _ = content["quality"]["confusion"]
    listed = [row for row in read_rollouts(run_folder / "rollouts") if row["role"] == "generator"]
    cell = table["rows"][1]["cells"][0]  # what it counts is what its link lists
    assert cell["count"] == sum("false_accept" in pack.flags_of(row) for row in listed) > 0
    assert (cell["name"], cell["link"]) == ("CORRECT", "only=false_accept&grade=wrong&role=generator")


def test_a_real_run(tiny_run, tmp_path):
    built = build_page(find_runs([tiny_run.workdir]), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    dumped = list(read_rollouts(tiny_run.workdir / "rollouts", with_evaluations=True))
    assert rollouts_in(page) == dumped
    evaluations = sum(row["phase"] == "eval" for row in read_metrics(tiny_run.workdir))
    assert [row["role"] for row in dumped].count("evaluation") == evaluations * 8  # of 8 problems
    assert built.rollouts == 3 * 8 + evaluations * 8  # three dumped turns of 4 prompts x 2 samples
    assert {kind for row in dumped for kind in row["solution"]["step_kinds"]} & {"easy letter", "hard letter"}
    content = json.loads(payload(page, "charts-0"))
    shown = (*content["training"], *content["quality"]["panels"], *content["speed"])
    titles = {panel["title"] for panel in shown}
    assert {"Generator", "Entropy", "Verdicts in training", "Seconds per turn", "Speed of sampling"} <= titles
    assert [row[0] for row in content["headline"]] == ["Generator accuracy", "Verifier step F1", "Verifier outcome F1"]


def test_alarms_from_their_first_turn_to_their_last():
    """A log-prob gap beyond 0.02 at turns 2 and 3, and a truncation rate that rings in a run of other limits."""
    gaps = (0.0, 0.05, 0.05, 0.0, 0.0)
    rows = [{"step": step, "phase": "generator", "generator/logprob_gap_mean": gap, "generator/logprob_gap_share": 0.0,
             "alarm/generator/logprob_gap": int(gap > 0), "alarm/generator/truncation": int(step == 5)}
            for step, gap in enumerate(gaps, 1)]
    run = Run("one", Path("one"), flatten(default_config()), rows, True)
    told = charts.alarms(run)
    assert told["note"] == "Alarms in 5 turns: 2 (1 still active at the last turn)."
    gap, truncation = told["rows"]
    assert (gap["name"], gap["turns"], gap["range"]) == ("generator/logprob_gap", "2 to 3", [2, 3])
    assert "0.025" in gap["seen"] and gap["limit"] == "0.02 nats, or a share of 0.02"
    assert (truncation["turns"], truncation["range"]) == ("5 (still active)", [5, 5])
    assert truncation["seen"] == "raised under different limits"
    before = run._replace(rows=[{"step": 1, "phase": "generator"}])
    assert charts.alarms(before)["note"] == "No alarms in 1 turn. Most are raised after 5 turns of a role."


def test_turns_that_an_early_end_of_the_warm_up_left_out_are_not_counted():
    """The first turn ended a warm-up of up to ten."""
    rows = [{"step": 1, "phase": "warmup"}, {"step": 10, "phase": "eval"}, {"step": 11, "phase": "generator"}]
    run = Run("one", Path("one"), flatten(default_config()), rows, True)
    assert charts.alarms(run)["note"].startswith("No alarms in 2 turns. Most are") and _facts(run)["turns"] == 2
    assert _facts(run._replace(is_finished=False))["turns"] == 11  # the turn's number


def test_the_plotting_library_is_the_published_file():
    data = (ROOT / "tango_jax/viewer/vendor/plotly-basic.min.js").read_bytes()
    assert hashlib.sha256(data).hexdigest() == "99784e3abfb07b142a15e521a439e6d9addceadb3f79553fd24c72774f0649ba"


# Names in the dump of what rewards and advantages are made of, and what a script would need to make them again.
PARTS = re.compile(r"\b(group_rewards|group_mean|group_std|step_rewards|terms)\b")
SUMS = re.compile(r"\.reduce\(|\bMath\.(sqrt|pow|hypot)\b|\*\*| [-*/%] |[-*/]=")
RULES = re.compile(r"\b(grpo|rloo|reinforce\w*|whiten\w*|use_std|mask_overlong|gamma|class_weight|outcome_weight)\b")


VERDICTS = re.compile(r"false.accept|false.reject|wrong.steps|misjudged|no.step.reward")  # what a verdict means


def code_of(name: str) -> str:
    """A script of the page without its comments."""
    text = (ROOT / "tango_jax/viewer" / f"{name}.js").read_text()
    return re.sub(r"(?m)^\s*//.*$|\s// .*$", "", text)


def test_the_page_only_shows_what_rewards_and_advantages_were_made_of():
    """Rules that were repeated in JavaScript would show wrong sums for any other credit."""
    about = [name for name in SCRIPTS if PARTS.search(code_of(name))]
    assert about == ["arithmetic"]
    assert not SUMS.search(code_of("arithmetic"))
    named = {name: RULES.findall(code_of(name)) + VERDICTS.findall(code_of(name)) for name in SCRIPTS}
    assert {name: found for name, found in named.items() if found} == {}


# ------------------------------------------------------------------------------------------------------- the numbers


def rollout(verdict="CORRECT", is_correct=True, judgements=(T, F), gold=(T, F), aligned=True, cut=(F, F)) -> dict:
    verification = {"verdict": verdict, "judgements": list(judgements), "is_aligned": aligned, "is_truncated": cut[1]}
    verification["text"] = "said"
    solution = {"text": "wrote", "is_correct": is_correct, "gold_steps": None if gold is None else list(gold),
                "is_truncated": cut[0], "steps": [[0, 1]] * 2}
    return {"turn": 3, "solution": solution, "verifications": [verification]}


OTHER_FIELDS = {"role": "generator", "row": 0, "group": 0, "advantage": None, "reward": None,
                "problem": {"id": "a", "question": "b", "answer": "c", "size": 1}}


@pytest.mark.parametrize("case, flags", [
    ({}, set()),
    ({"is_correct": False}, {"false_accept"}),
    ({"verdict": "INCORRECT"}, {"false_reject"}),
    ({"verdict": "INCORRECT", "is_correct": False}, set()),
    ({"verdict": "INVALID"}, {"invalid"}),
    ({"judgements": (T,), "aligned": False}, {"misaligned"}),  # judges no step, so none wrongly
    ({"judgements": (T, T)}, {"misjudged", "wrong_steps"}),
    ({"judgements": (T, T), "verdict": "INCORRECT"}, {"misjudged", "false_reject"}),
    ({"judgements": (T, T), "gold": None}, set()),
    ({"judgements": (F, None), "gold": (F, T), "is_correct": False, "verdict": "INCORRECT"}, set()),  # it stopped
    ({"judgements": (F, None), "verdict": "INCORRECT"}, {"misjudged", "false_reject"}),
    ({"cut": (True, False)}, {"truncated"}),
    ({"cut": (False, True), "is_correct": False}, {"truncated", "false_accept"}),
])
def test_flags(case, flags):
    assert pack.flags_of(rollout(**case)) == flags


@pytest.mark.parametrize("case, told", [
    ({}, {"meaning": "verdict and grade agree", "agrees": True, "why": ""}),
    ({"is_correct": False}, {"meaning": "false accept", "agrees": False, "why": ""}),
    ({"verdict": "INCORRECT", "judgements": (T, T)}, {"meaning": "false reject", "agrees": False, "why": ""}),
    ({"verdict": "INVALID"}, {"meaning": "INVALID", "agrees": False, "why": ""}),
    ({"judgements": (T, T)}, {"meaning": "right verdict, wrong steps", "agrees": False, "why": ""}),
    ({"judgements": (T, None), "aligned": False},
     {"meaning": "verdict and grade agree", "agrees": True, "why": "no judgement of step 2"}),
])
def test_what_the_page_says_of_a_verification_comes_from_here(case, told):
    packed = pack.pack_rollout(0, rollout(**case) | OTHER_FIELDS)
    assert json.loads(packed.rest)["verifications"][0]["told"] == told


def test_the_worst_has_the_highest_severity():
    cases = ({"is_correct": False}, {"verdict": "INCORRECT"}, {"judgements": (T, T)}, {"verdict": "INVALID"}, {})
    found = [pack.pack_rollout(0, rollout(**case) | OTHER_FIELDS).columns["severity"] for case in cases]
    assert found == sorted(found, reverse=True) and len(set(found)) == len(found) and found[-1] == 0


def test_without_a_verifier_only_truncation_is_flagged():
    row = rollout(is_correct=False, cut=(True, False)) | {"verifications": []}
    assert pack.flags_of(row) == {"truncated"}


@pytest.mark.parametrize("count", [1, 2])
def test_a_single_turn_is_a_point_since_a_line_would_show_nothing(count):
    turns = np.arange(1.0, 1 + count)
    _, mean = panels.noisy("verifier", Series(turns, turns), "#112233")
    assert mean["mode"] == ("lines+markers" if count == 1 else "lines") and len(mean["x"]) == count
    assert ("symbol" in mean.get("marker", {})) == (count == 1)  # the legend of the page draws it


@pytest.mark.parametrize("values, limits", [
    ([0.0, 0.0], [-0.02, 0.18]), ([1.0], [0.82, 1.02]), ([0.5], [0.4, 0.6]), ([0.0, 1.0], [-0.02, 1.02]),
])
def test_the_axis_of_a_share_has_no_room_beyond_its_limits(values, limits):
    drawn = panels.panel("Share", "", [{"y": values}], "turn", score=True)
    assert drawn["layout"]["yaxis"]["range"] == pytest.approx(limits)


def test_the_axis_of_one_value_begins_at_zero():
    one, two = (panels.panel("Gap", "", [{"y": values}], "turn") for values in ([3.6e-5, 3.6e-5], [3.6e-5, 4e-5]))
    assert one["layout"]["yaxis"]["rangemode"] == "tozero" and "rangemode" not in two["layout"]["yaxis"]


def test_rollouts_are_thinned_out_evenly_and_so_are_evaluations():
    def packed(turn, role, group, count):
        columns = {"role": pack.ROLLOUT_ROLES.index(role)}
        return [pack.Packed(0, (0, turn, role, group), columns, str(i), ("", ""), b"", b"") for i in range(count)]

    everything = []
    for turn in range(60):
        everything += [item for group in range(4) for item in packed(turn, "generator", group, 4)]
        everything += packed(turn, "evaluation", 0, 200) if turn % 10 == 0 else []
    for limit in (300, 500, 1000, 1500):
        kept = pack.thin_out(everything, limit / len(everything))
        assert limit - 16 <= len(kept) <= limit
        turns = [item.group[1] for item in kept if item.group[2] == "generator"]
        assert turns[0] < 10 and turns[-1] >= 50
        evaluated = [item.label for item in kept if item.group[2] == "evaluation"]
        assert evaluated == evaluated[: len(evaluated) // 6] * 6 and len(set(evaluated)) == len(evaluated) // 6


@pytest.mark.parametrize("settings, row, message", [
    ("[]", '{"phase": "eval", "step": 1}', r"config\.json holds a list, not an object: leave this run out, or restore"),
    ('{"arm": 3}', '{"phase": "eval", "step": 1}', r"config\.json holds no settings with an arm; it is no run of this"),
    ('{"arm": "grpo"}', "3", r"metrics\.jsonl, row 1 lacks a phase or a step; it is no run of this project, or damage"),
    ('{"arm": "grpo"}', '{"step": 1}', r"metrics\.jsonl, row 1 lacks a phase or a step"),
])
def test_a_folder_of_another_project_is_named(tmp_path, settings, row, message):
    (tmp_path / "config.json").write_text(settings)
    (tmp_path / "metrics.jsonl").write_text(row + "\n")
    with pytest.raises(ValueError, match=message):
        find_runs([tmp_path])
