"""Runs the notebooks, and stores their outputs in them:

    PYTHONPATH=tests python -m support.notebook_runs notebooks/01_last_letter.ipynb [notebooks/...]

runs each at the size that its parameters cell says, in a kernel of this Python, and writes it back with its outputs.
The tests run them at a smaller size with a cell of other parameters after that one, and store nothing.
"""

import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from support.paths import ROOT
from support.processes import HANG_S

NOTEBOOKS = ROOT / "notebooks"
MACHINE_PATHS = (str(ROOT), str(Path.home()), sys.prefix)


def run_notebook(
    path: Path, parameters: Mapping[str, object], environment: Mapping[str, str] = os.environ
) -> nbformat.NotebookNode:
    """The executed notebook, with clean outputs. Its kernel starts in the folder of the notebook, as Jupyter's does.

    `parameters` become a cell after the one with the tag "parameters", which has such names; it is not in the result.
    Raises nbclient's CellExecutionError where a cell fails.
    """
    notebook = nbformat.read(path, as_version=4)
    place = next(i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", ()))
    lines = [f"{name} = {value!r}" for name, value in parameters.items()]
    notebook.cells.insert(place + 1, nbformat.v4.new_code_cell("\n".join(lines)))
    folder = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(notebook, timeout=HANG_S, kernel_name="python3", resources=folder)
    asyncio.run(client.async_execute(env=dict(environment)))  # its `execute` leaves an event loop open in each thread
    del notebook.cells[place + 1]
    clean(notebook)
    return notebook


def clean(notebook: nbformat.NotebookNode) -> None:
    """Take out what tells of this machine and this moment: versions, times, paths, what libraries warn of."""
    notebook.metadata = nbformat.from_dict(
        {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
         "language_info": {"name": "python"}}
    )
    count = 0
    for cell in notebook.cells:
        tags = cell.metadata.get("tags")
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        if cell.cell_type != "code":
            continue
        count += 1
        cell.execution_count = count
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = count
            if "metadata" in output:
                output.metadata = nbformat.from_dict({})
            output.pop("transient", None)
        cell.outputs = _joined(cell.outputs)


def _joined(outputs: list) -> list:
    """Neighbouring pieces of standard output as one, without machine paths; outputs that show nothing are left out."""
    kept = []
    for output in outputs:
        if output.output_type != "stream":
            kept += [output] if set(output.data.values()) - {"", "<IPython.core.display.HTML object>"} else []
        elif output.name == "stdout" and kept and kept[-1].get("name") == "stdout":
            kept[-1].text += output.text
        elif output.name == "stdout":
            kept.append(output)
    for output in kept:
        if output.output_type == "stream":
            for path in MACHINE_PATHS:
                output.text = output.text.replace(f"{path}/", "")
    return kept


def main(names: list[str]) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    for name in names:
        path = Path(name).resolve()
        notebook = run_notebook(path, {})
        nbformat.validate(notebook)
        nbformat.write(notebook, path)
        print(f"{name}: {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main(sys.argv[1:])
