"""Shows a run in a notebook cell: live curves during training, and the report afterwards."""

import contextlib
import html
import threading
from collections.abc import Iterator
from pathlib import Path

from IPython.display import HTML, DisplayHandle, Image

from tango_jax.config import ROLES, read_settings
from tango_jax.notebook.pictures import loss_figure, show
from tango_jax.runtime.console import Console
from tango_jax.tracking.metrics import read_metrics
from tango_jax.tracking.plots import plot_curves

MIN_EVALUATIONS = 3


@contextlib.contextmanager
def live_curves(workdir: Path, title: str, every_s: float = 5.0) -> Iterator[Console]:
    """Yields the console for `train`, which logs to WORKDIR/log.txt, and redraws the run's curves in this cell."""
    workdir.mkdir(parents=True, exist_ok=True)
    losses, curves, line = DisplayHandle(), DisplayHandle(), DisplayHandle()
    losses.display(HTML(""))
    curves.display(HTML(""))
    line.display(HTML("starting the run"))
    is_over = threading.Event()

    def draw() -> None:
        for handle, picture in ((losses, draw_stage_one(workdir, title)), (curves, draw_turns(workdir, title))):
            if picture is not None:
                handle.update(picture)

    def watch() -> None:
        while not is_over.wait(every_s):
            draw()
            line.update(HTML(f"<code>{html.escape(last_line(workdir / 'log.txt'))}</code>"))

    thread = threading.Thread(target=watch, name="live curves", daemon=True)
    with open(workdir / "log.txt", "a", encoding="utf-8") as stream:
        thread.start()
        try:
            yield Console(stream=stream, interval_s=1.0)
        finally:
            is_over.set()
            thread.join()
            draw()
            line.update(HTML(""))


def draw_stage_one(workdir: Path, title: str) -> Image | None:
    losses = {role: read_metrics(path) for role in ROLES if (path := workdir / f"sft/{role}/metrics.jsonl").exists()}
    return show(loss_figure(losses, f"{title}: stage 1")) if any(losses.values()) else None


def draw_turns(workdir: Path, title: str) -> Image | None:
    """None before the third evaluation: a line between two points says little."""
    rows = read_metrics(workdir / "metrics.jsonl") if (workdir / "metrics.jsonl").exists() else []
    if sum(row["phase"] == "eval" for row in rows) < MIN_EVALUATIONS:
        return None
    stops = read_settings(workdir / "config.json")["verifier.stop_at_first_error"]
    return show(plot_curves(rows, f"{title}: stage 2", stops))


def last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return lines[-1].strip() if lines else ""


def inline_page(path: Path, height: int = 860) -> HTML:
    """A page of `tango_jax.report`, stored in the saved notebook."""
    page = html.escape(path.read_text(encoding="utf-8"), quote=True)
    style = f"width: 100%; height: {height}px; border: 1px solid #ccc"
    # The sandbox keeps the page out of the notebook. The div avoids IPython's warning about HTML that starts with
    # iframe.
    rights = 'sandbox="allow-scripts allow-modals"'
    return HTML(f'<div><iframe {rights} srcdoc="{page}" style="{style}" title="report of the run"></iframe></div>')
