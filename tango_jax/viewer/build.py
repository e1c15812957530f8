"""Builds the report: takes runs and writes one self-contained HTML file. Last stage of the report.

Large parts (the plotting library, the charts of each run, the chunks of rollouts) are stored as gzip in base64 and are
decoded by the browser on demand. So no text of a model appears in the markup; and if some ever did, the page's
Content-Security-Policy would keep it inert: it allows only the page's own scripts and styles, by hash.
"""

import base64
import hashlib
import html
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from tango_jax.arms import DEFAULT_ARM
from tango_jax.runtime.atomic import write_atomically
from tango_jax.runtime.model_text import on_one_line
from tango_jax.tracking.rollout_dump import read_rollouts
from tango_jax.viewer import alarm_table, charts, pack, performance, quality
from tango_jax.viewer.runs import Run

SCRIPTS = ("text", "data", "list", "filters", "controls", "arithmetic", "rollout", "viewer", "charts", "main")
MAX_ROLLOUTS = 20_000
MAX_BYTES = 19_000_000  # size limit of the page
PLOTLY = "vendor/plotly-basic.min.js"
LOSS_SETTINGS = ("algorithm", "use_std", "mask_overlong")


class Built(NamedTuple):
    """What a page contains."""

    runs: int
    rollouts: int
    rollouts_dumped: int
    size: int  # bytes


def build_page(runs: Sequence[Run], out: Path, max_rollouts: int = MAX_ROLLOUTS, max_bytes: int = MAX_BYTES) -> Built:
    """Write the report. Rollouts beyond either limit are left out, in whole groups and evenly, and the page says so."""
    packed, pages = [], []
    for index, run in enumerate(runs):
        judged = []
        for rollout in read_rollouts(run.rollouts):
            packed.append(pack.pack_rollout(index, rollout))
            judged += quality.judged(rollout)
        pages.append(pack.encode_json(_charts_of(run, judged)))
    fixed = {
        "plotly": pack.encode(_read(PLOTLY).encode()),
        "arms": pack.encode_json({"panels": charts.arms(runs), "table": charts.arms_table(runs)} if runs[1:] else {}),
        **{f"charts-{index}": page for index, page in enumerate(pages)},
    }
    title = "RL Tango: " + (runs[0].name if len(runs) == 1 else f"{len(runs)} runs")
    facts = {"runs": [_facts(run) for run in runs], "dumped": len(packed)}
    fixed["facts"] = pack.encode_json(facts)
    kept = pack.thin_out(packed, max_rollouts / len(packed)) if len(packed) > max_rollouts else packed
    kept, payloads = _within(kept, max_bytes - len(_fill(title, fixed).encode()))
    page = _fill(title, fixed | payloads)
    write_atomically(out, page)  # atomic: reloading shows either the old page or the new one
    return Built(len(runs), len(kept), len(packed), out.stat().st_size)


def _charts_of(run: Run, judged: list[quality.Judged]) -> dict:
    return {
        "headline": charts.headline(run),
        "training": charts.training(run),
        "alarms": alarm_table.alarms(run),
        "verifier": charts.verifier(run, judged),
        "confusion": charts.confusion_tables(judged),
        "speed": performance.speed(run),
        "speed_tables": [item for item in (performance.speed_table(run), performance.memory_table(run)) if item],
    }


def _facts(run: Run) -> dict:
    """Facts about a run that the page displays or needs to explain its rewards."""
    loss = {role: {name: run.settings[f"{role}.loss.{name}"] for name in LOSS_SETTINGS}
            for role in ("generator", "verifier")}  # fmt: skip
    return {
        "name": run.name,
        "arm": run.arm,
        "is_default_arm": run.arm == DEFAULT_ARM,
        "seed": run.settings["seed"],
        "task": run.settings["task.name"],
        "turns": max((row["step"] for row in run.rows), default=0),
        "is_finished": run.is_finished,
        "loss": loss,
        "own_reward": {role: _short_name(run.settings[f"{role}.reward"]) for role in ("generator", "verifier")},
    }


def _short_name(function: str) -> str:
    """The setting FILE.py:name without the folders of the file."""
    place, separator, name = function.rpartition(":")
    return f"{Path(place).name}{separator}{name}"


def _within(packed: list[pack.Packed], room: int) -> tuple[list[pack.Packed], dict[str, str]]:
    """As many rollouts as fit into `room` bytes of the page, and their payloads."""
    kept = packed
    while True:
        chunks = {f"chunk-{index}": chunk for index, chunk in enumerate(pack.chunks_of(kept))}
        payloads = {"columns": pack.encode_json(pack.columns_of(kept))} | chunks
        size = sum(len(_element(name, value)) + 1 for name, value in payloads.items())
        if size <= room or not kept:
            return kept, payloads
        kept = pack.thin_out(kept, 0.95 * max(room, 0) / size)


def _fill(title: str, payloads: dict[str, str]) -> str:
    """The page template with style, scripts and payloads filled in."""
    script = '\n"use strict";\n(() => {\n' + "\n".join(_read(f"{name}.js") for name in SCRIPTS) + "\n})();\n"
    style = f"\n{_read('style.css')}\n"
    data = "\n".join(_element(name, value) for name, value in payloads.items())
    page = _read("page.html")
    title = html.escape(on_one_line(title))  # runs are named after their folders, which may have any name
    policy = _policy((script, _read(PLOTLY)), style)
    parts = {"policy": policy, "title": title, "style": style, "data": data, "script": script}
    for mark, text in parts.items():
        page = page.replace(f"<!--{mark}-->", text)
    return page


def _policy(scripts: Sequence[str], style: str) -> str:
    """The page's Content-Security-Policy: these scripts, this style, the icon's `data:` URL, and nothing else."""
    # The plotting library creates an empty style element and adds rules by script, which requires the hash of "".
    return "; ".join([
        "default-src 'none'", f"script-src {' '.join(map(_source_hash, scripts))}",
        f"style-src {_source_hash(style)} {_source_hash('')}", "img-src data:", "base-uri 'none'", "form-action 'none'",
    ])  # fmt: skip


def _source_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _element(name: str, value: str) -> str:
    return f'<script type="text/plain" id="data-{name}">{value}</script>'


def _read(name: str) -> str:
    return (resources.files("tango_jax.viewer") / name).read_text(encoding="utf-8")
