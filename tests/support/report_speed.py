"""How quick the report is with many rollouts: its size, the time from opening to usable, and that of each filter.

    PYTHONPATH=tests python -m support.report_speed runs/last_letter  # a real run's rollouts, copied up to 20,000
    PYTHONPATH=tests python -m support.report_speed --length=20       # made up, 20 words a step

Copies have other letters in all words, so that they do not compress as copies would. Needs Chromium (browser.py).
Opened is measured from the start of the navigation; a filter from the click to the next picture.
"""

import argparse
import json
import re
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from support.browser import Page, open_browser
from support.report_cases import run_config, write_run
from tango_jax.tracking.rollout_dump import dumped_turns
from tango_jax.viewer.build import build_page
from tango_jax.viewer.runs import find_runs

LETTERS = "abcdefghijklmnopqrstuvwxyz"
# Tags, LaTeX commands and verdicts stay as they are; only lower-case words are changed, and keep their length.
WORD = re.compile(r"(</?\w+>|\\+\w+(?:\{[A-Z]+\})?)|[a-z]+")


def disguise(text: str, rng) -> str:
    """The text in other letters."""
    table = str.maketrans(LETTERS, "".join(rng.permutation(list(LETTERS))))
    return WORD.sub(lambda match: match[0] if match[1] else match[0].translate(table), text)


def copied_run(run: Path, folder: Path, count: int) -> Path:
    """The run with its rollouts repeated, each time in later turns, until there are at least `count`."""
    (folder / "rollouts").mkdir(parents=True)
    for name in ("config.json", "metrics.jsonl"):
        (folder / name).write_bytes((run / name).read_bytes())
    dumped = dumped_turns(run / "rollouts")
    files = [(path, turn, [json.loads(line) for line in path.read_bytes().splitlines()]) for path, turn, _ in dumped]
    assert files, f"{run} has no dumped rollouts"
    last, rng, done, offset = files[-1][1], np.random.default_rng(0), 0, 0
    while done < count:
        for path, turn, rows in files:
            if done >= count:
                break
            lines = [json.dumps(copy_of(row, offset, rng)) for row in rows]
            name = re.sub(r"turn_\d+", f"turn_{turn + offset:06d}", path.name)
            (folder / "rollouts" / name).write_text("\n".join(lines) + "\n")
            done += len(lines)
        offset += last
    return folder


def copy_of(row: dict, offset: int, rng) -> dict:
    """A rollout in later turns; the first copy of all is the rollout itself."""
    row = row | {"turn": row["turn"] + offset}
    if offset == 0:
        return row
    texts = [row["problem"]["question"], row["solution"]["text"], *(item["text"] for item in row["verifications"])]
    question, solution, *others = disguise("\0".join(texts), rng).split("\0")
    return row | {
        "problem": row["problem"] | {"question": question},
        "solution": row["solution"] | {"text": solution},
        "verifications": [item | {"text": text} for item, text in zip(row["verifications"], others, strict=True)],
    }


def until_painted(page: Page, action: str) -> float:
    """Milliseconds from an action to the picture after it."""
    return page.driver.execute_async_script(f"""
        const done = arguments[0], started = performance.now();
        {action};
        requestAnimationFrame(() => setTimeout(() => done(performance.now() - started)));
    """)


def set_field(field: str, value: str, event: str) -> str:
    """The action of typing into a field, or of choosing in it."""
    return f"(() => {{ const f = {field}; f.value = {value!r}; f.dispatchEvent(new Event({event!r})); }})()"


def measure(page: Page, report: Path, repeats: int = 5) -> dict[str, float]:
    """Milliseconds, the median of a few: opening, each filter, the next rollout, the first search and a later one."""
    marks = {"usable": [], "first-rollout": [], "first-chart": []}
    for _ in range(repeats):
        page.open(report)
        page.wait("performance.getEntriesByName('first-chart').length > 0")
        for name, times in marks.items():
            times.append(page.js(f"performance.getEntriesByName('{name}')[0].startTime"))
    found = {f"opened, {name}": statistics.median(times) for name, times in marks.items()}
    page.open(report, "order=")
    started = time.monotonic()
    page.js(set_field("document.querySelector('#search')", "x", "input"))
    page.wait("/rollouts/.test(document.querySelector('#found').textContent)")
    found["first search, texts unread"] = 1000 * (time.monotonic() - started)
    searches = [until_painted(page, set_field("document.querySelector('#search')", query, "input"))
                for query in ("qu", "qui", "boxed{incorrect", "zz", "")]
    found["search, texts read"] = statistics.median(searches)
    chips = [until_painted(page, f"document.querySelector('#chips button:nth-child({n})').click()")
             for n in (1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6)]
    orders = [until_painted(page, set_field("document.querySelector('#order')", order, "change"))
              for order in ("advantage", "steps", "")]
    found |= {"filter, median": statistics.median(chips), "filter, slowest": max(chips), "order, slowest": max(orders)}
    key = "document.body.dispatchEvent(new KeyboardEvent('keydown', { key: 'j', bubbles: true }))"
    found["next rollout"] = statistics.median(until_painted(page, key) for _ in range(10))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, help="workdir of a run with rollouts")
    parser.add_argument("--rollouts", type=int, default=20_000)
    parser.add_argument("--length", type=int, default=6, help="words a step of made-up rollouts")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if options.run:
            run = copied_run(options.run, folder / "run", options.rollouts)
        else:
            turns = -(-options.rollouts // 100)
            run = write_run(folder / "run", run_config(groups=25), turns=turns, length=options.length)
        started = time.monotonic()
        built = build_page(find_runs([run]), folder / "report.html", options.rollouts)
        print(f"{built.rollouts} of {built.rollouts_dumped} rollouts, {built.size / 1e6:.1f} MB, "
              f"written in {time.monotonic() - started:.1f} s")
        with open_browser(folder / "profile") as page:
            for name, milliseconds in measure(page, folder / "report.html").items():
                print(f"{name:32} {milliseconds:8.0f} ms")


if __name__ == "__main__":
    main()
