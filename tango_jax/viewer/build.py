"""Builds the report: one self-contained HTML file, or a folder.

Large parts are base64 of gzip, decoded by the browser on demand: no text of a model appears in the markup. The page's
Content-Security-Policy allows only its own scripts and styles, by hash. A folder (`build_bundle`) has the rollouts in
files; its policy also allows scripts of its origin.
"""

import base64
import hashlib
import html
from collections.abc import Collection, Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from tango_jax.method.arms import DEFAULT_ARM
from tango_jax.runtime.atomic import write_atomically
from tango_jax.runtime.model_text import on_one_line
from tango_jax.tracking.learning_curve import trains_generator
from tango_jax.tracking.provenance import describe
from tango_jax.tracking.rollout_dump import read_rollouts
from tango_jax.viewer import charts, comparison, lines, pack, quality
from tango_jax.viewer.runs import Run, own_samples

SCRIPTS = ("text", "data", "list", "filters", "controls", "arithmetic", "paint", "rollout", "compare", "viewer",
           "charts", "main")
MAX_ROLLOUTS = 20_000
MAX_BYTES = 19_000_000  # size limit of the page
BUNDLE_CHUNK = 512  # rollouts in a file of a bundle
PLOTLY = "vendor/plotly-basic.min.js"
MARK = '<meta name="generator" content="tango_jax.report">'


class Built(NamedTuple):
    runs: int
    rollouts: int
    rollouts_dumped: int
    size: int  # bytes
    warnings: tuple[str, ...] = ()


def build_page(
    runs: Sequence[Run], out: Path, max_rollouts: int = MAX_ROLLOUTS, max_bytes: int = MAX_BYTES,
    as_seed: Collection[str] = (),
) -> Built:
    """Write the report; rollouts beyond either limit are left out, evenly.

    `as_seed`: settings, besides the seed, in which runs of one line of the comparison may differ. Raises ValueError if
    `out` is a file and no report.
    """
    _check_is_report(out, f"--out={out} is no report and would be overwritten; name another file")
    title, payloads, packed, warnings = _content(runs, as_seed)
    kept = _at_most(packed, max_rollouts)
    kept, chosen = _within(kept, max_bytes - len(_fill(title, payloads).encode()))
    # Atomic: reloading shows either the old page or the new one.
    write_atomically(out, _fill(title, payloads | chosen))
    return Built(len(runs), len(kept), len(packed), out.stat().st_size, warnings)


def build_bundle(
    runs: Sequence[Run], folder: Path, max_rollouts: int | None = None, as_seed: Collection[str] = ()
) -> Built:
    """Write the report as a folder: index.html, and data/ with all rollouts or at most `max_rollouts`.

    Chunks are named by their contents, and old ones are deleted last: an interruption leaves the old or the new report.
    Raises ValueError if index.html is there and no report.
    """
    index, data = folder / "index.html", folder / "data"
    _check_is_report(index, f"--bundle={folder}: its index.html is no report and would be overwritten; name another "
                     "folder")
    title, payloads, packed, warnings = _content(runs, as_seed)
    kept = packed if max_rollouts is None else _at_most(packed, max_rollouts)
    names = []
    for chunk in pack.chunks_of(kept, BUNDLE_CHUNK):
        names.append(f"chunk-{hashlib.sha256(chunk.encode()).hexdigest()[:16]}.js")
        if not (data / names[-1]).exists():
            write_atomically(data / names[-1], f'tangoChunk("{names[-1]}", "{chunk}");\n')
    columns = pack.columns_of(kept, BUNDLE_CHUNK) | {"files": names}
    page = _fill(title, payloads | {"columns": pack.encode_json(columns)}, "'self'")
    write_atomically(index, page)
    for path in data.glob("chunk-*.js"):
        if path.name not in names:
            path.unlink()
    size = sum(path.stat().st_size for path in (index, *(data / name for name in set(names))))
    return Built(len(runs), len(kept), len(packed), size, warnings)


def _check_is_report(path: Path, message: str) -> None:
    if path.exists() and MARK not in path.read_text(encoding="utf-8", errors="replace")[:2000]:
        raise ValueError(message)


def _content(
    runs: Sequence[Run], as_seed: Collection[str]
) -> tuple[str, dict[str, str], list[pack.Packed], tuple[str, ...]]:
    packed, pages, others = [], [], 0
    for index, run in enumerate(runs):
        judged = []
        for rollout in read_rollouts(run.rollouts, with_evaluations=True):
            if rollout["solution"] is None:  # of a custom prompt
                others += 1
                continue
            packed.append(pack.pack_rollout(index, rollout))
            judged += quality.judged(rollout)
        pages.append(pack.encode_json(_charts_of(run, quality.of_one_role(judged))))
    found = lines.lines_of(runs, as_seed)
    warnings = lines.warnings(found, as_seed)
    if others:
        warnings.append(f"{others} rollouts are not about a solution; they are only in rollouts/")
    facts = {"runs": [_facts(run) for run in runs], "dumped": len(packed), "warnings": warnings}
    payloads = {
        "plotly": pack.encode(_read(PLOTLY).encode()),
        "comparison": pack.encode_json(comparison.comparison(found, as_seed) if runs[1:] else {}),
        **{f"charts-{index}": page for index, page in enumerate(pages)},
        "facts": pack.encode_json(facts),
    }
    title = "RL Tango: " + (runs[0].name if len(runs) == 1 else f"{len(runs)} runs")
    return title, payloads, packed, tuple(warnings)


def _charts_of(run: Run, judged: list[quality.Judged]) -> dict:
    return {
        "headline": charts.headline(run),
        "training": charts.training(run),
        "alarms": charts.alarms(run),
        "quality": quality.section(run, judged),
        "speed": charts.speed(run),
    }


def _facts(run: Run) -> dict:
    return {
        "name": run.name,
        "arm": run.arm,
        "is_default_arm": run.arm == DEFAULT_ARM,
        "trains_generator": trains_generator(run.arm),
        "seed": run.settings["seed"],
        "task": run.settings["task.name"],
        "turns": run.turns_made if run.is_finished else max((row["step"] for row in run.rows), default=0),
        "is_finished": run.is_finished,
        "made_with": [*describe(run.provenance), *own_samples(run.workdir, run.settings)],
    }


def _at_most(packed: list[pack.Packed], count: int) -> list[pack.Packed]:
    kept, fraction = packed, 1.0
    while len(kept) > count:  # whole groups may go a little beyond
        fraction = min(0.98 * fraction, count / len(packed))
        kept = pack.thin_out(packed, fraction)
    return kept


def _within(packed: list[pack.Packed], room: int) -> tuple[list[pack.Packed], dict[str, str]]:
    """The rollouts that fit into `room` bytes of the page, and their payloads."""
    kept = packed
    while True:
        chunks = {f"chunk-{index}": chunk for index, chunk in enumerate(pack.chunks_of(kept))}
        payloads = {"columns": pack.encode_json(pack.columns_of(kept))} | chunks
        size = sum(len(_element(name, value)) + 1 for name, value in payloads.items())
        if size <= room or not kept:
            return kept, payloads
        kept = pack.thin_out(kept, 0.95 * max(room, 0) / size)


def _fill(title: str, payloads: dict[str, str], script_sources: str = "") -> str:
    script = '\n"use strict";\n(() => {\n' + "\n".join(_read(f"{name}.js") for name in SCRIPTS) + "\n})();\n"
    style = f"\n{_read('style.css')}\n"
    data = "\n".join(_element(name, value) for name, value in payloads.items())
    page = _read("page.html")
    title = html.escape(on_one_line(title))  # a folder, and so a run, may have any name
    policy = _policy((script, _read(PLOTLY)), style, script_sources)
    parts = {"policy": policy, "mark": MARK, "title": title, "style": style, "data": data, "script": script}
    for mark, text in parts.items():
        page = page.replace(f"<!--{mark}-->", text)
    return page


def _policy(scripts: Sequence[str], style: str, script_sources: str) -> str:
    # The plotting library adds rules by script to an empty style element, which requires the hash of "".
    sources = " ".join(filter(None, (*map(_source_hash, scripts), script_sources)))
    return "; ".join([
        "default-src 'none'", f"script-src {sources}", f"style-src {_source_hash(style)} {_source_hash('')}",
        "img-src data:", "base-uri 'none'", "form-action 'none'",
    ])


def _source_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _element(name: str, value: str) -> str:
    return f'<script type="text/plain" id="data-{name}">{value}</script>'


def _read(name: str) -> str:
    return (resources.files("tango_jax.viewer") / name).read_text(encoding="utf-8")
