"""What a notebook's cell shows of a run: its curves while it goes on, its report afterwards.

In: the workdir that `train` writes to, or a page of `tango_jax.report`. Out: the output of the cell. Stage: beside
`train`, which knows nothing of it: a thread reads the run's files.
"""

import contextlib
import html
import threading
from collections.abc import Iterator
from pathlib import Path

from IPython.display import HTML, DisplayHandle, Image

from tango_jax.notebook.pictures import as_output, loss_figure, show
from tango_jax.runtime.console import Console
from tango_jax.tracking.metrics import read_metrics
from tango_jax.tracking.plots import plot_curves

ROLES = ("generator", "verifier")
MIN_EVALUATIONS = 3


@contextlib.contextmanager
def live_curves(workdir: Path, title: str, every_s: float = 5.0) -> Iterator[Console]:
    """Around `train`: yields the console to hand to it, and draws the run's curves into this cell again and again.

    What the run says goes to WORKDIR/log.txt; the newest line of it stands under the curves until the run is over.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    losses, curves, line = DisplayHandle(), DisplayHandle(), DisplayHandle()
    losses.display(HTML(""))
    curves.display(HTML(""))
    line.display(HTML("the run starts"))
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
    """The held-out losses of stage 1; None where nothing is logged yet."""
    losses = {role: read_metrics(path) for role in ROLES if (path := workdir / f"sft/{role}/metrics.jsonl").exists()}
    return show(loss_figure(losses, f"{title}: stage 1")) if any(losses.values()) else None


def draw_turns(workdir: Path, title: str) -> Image | None:
    """The curves of stage 2, from its third evaluation on: a line between two points says little."""
    rows = read_metrics(workdir / "metrics.jsonl") if (workdir / "metrics.jsonl").exists() else []
    if sum(row["phase"] == "eval" for row in rows) < MIN_EVALUATIONS:
        return None
    plot_curves(rows, workdir / "live.png", f"{title}: stage 2")
    return as_output(workdir / "live.png")


def last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return lines[-1].strip() if lines else ""


def inline_page(path: Path, height: int = 860) -> HTML:
    """A page of `tango_jax.report` inside the notebook; it stays in the saved file."""
    page = html.escape(path.read_text(encoding="utf-8"), quote=True)
    style = f"width: 100%; height: {height}px; border: 1px solid #ccc"
    # The sandbox: the page has an origin of its own, and so no way into the notebook. The div: IPython warns of HTML
    # that begins with a frame, and means those with an address.
    rights = 'sandbox="allow-scripts allow-modals"'
    return HTML(f'<div><iframe {rights} srcdoc="{page}" style="{style}" title="report of the run"></iframe></div>')
