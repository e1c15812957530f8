"""The notebooks: run from top to bottom, offline and small; what is stored in them is whole and of the same kind.

After a change to one, `PYTHONPATH=tests python -m support.notebook_runs notebooks/NAME.ipynb` runs it in full and
stores its outputs.
"""

import ast
import base64
import dataclasses
import io
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import PIL.Image
import pytest

from support.browser import open_browser
from support.notebook_runs import NOTEBOOKS, run_notebook
from support.paths import ROOT
from support.tiny_checkpoints import MODEL, write_tiny_folder
from support.xla_settings import on_devices

# Pictures that are stored.
FIGURES = {"01_last_letter": 3, "02_small_checkpoint": 2, "03_follow_one_problem": 12, "04_change_the_method": 1,
           "05_one_device": 2, "06_judge_solutions": 1}
MAX_BYTES = 2_000_000
MACHINE_PATH = re.compile(r"(?<![\w.>])/(?:tmp|root|home|work|opt|usr|content)/")


def small_parameters(folder: Path) -> dict[str, dict]:
    model = write_tiny_folder(folder / "model", dataclasses.replace(MODEL, num_layers=1))
    return {
        "01_last_letter": {
            "WORKDIR": str(folder / "01"), "LAYERS": 1, "SFT_STEPS": 4, "WARMUP_STEPS": 1, "GENERATOR_STEPS": 3,
            "PROBLEMS": 4, "HELD_OUT": 8,
        },
        # Its tokenizer knows few words: the same texts are longer.
        "02_small_checkpoint": {
            "WORKDIR": str(folder / "02"), "CHECKPOINT": str(model), "SFT_STEPS": 2, "GENERATOR_LENGTHS": (64, 96),
            "VERIFIER_LENGTHS": (160, 240),
        },
        "05_one_device": {
            "WORKDIR": str(folder / "05"), "CHECKPOINT": str(model), "SFT_STEPS": 2, "RANK": 4,
            "GENERATOR_LENGTHS": (64, 96), "VERIFIER_LENGTHS": (160, 240),
        },
        "06_judge_solutions": {
            "WORKDIR": str(folder / "06"), "CHECKPOINT": str(model), "MAX_PROMPT": 2400, "MAX_NEW": 240,
        },
        "03_follow_one_problem": {"WORKDIR": str(folder / "03"), "SFT_STEPS": 30, "PROBLEMS": 2},
        "04_change_the_method": {"WORKDIR": str(folder / "04"), "SEEDS": (0,), "SETTINGS": {
            "rl.warmup_steps": 0, "rl.generator_steps": 3, "eval.problems": 8, "eval.pool": 8,
            "rl.prompts_per_step": 2, "rl.samples_per_prompt": 4,
            **{f"{role}.{key}": value for role in ("generator", "verifier")
               for key, value in {"sft.steps": 4, "sft.batch_size": 8, "sft.eval_examples": 8, "row_buckets": (8,),
                                  "sft.max_heldout_loss": 0.0, "model.num_layers": 1}.items()}}},
    }


# The others use what these do.
RUN_LESS_OFTEN = ("02_small_checkpoint", "04_change_the_method")


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """Each notebook that is asked for as a future, executed or on the way: most of the time is compiling, which takes
    one core."""
    asked = {item.callspec.params["executed"] for item in request.session.items
             if "executed" in getattr(getattr(item, "callspec", None), "params", ())}
    folder = tmp_path_factory.mktemp("notebooks")
    # One device, nothing that is written at home, and no package index: an installation would fail.
    home = {"HOME": str(folder), "IPYTHONDIR": str(folder / "ipython")}
    environment = {**on_devices(1), **home, "PIP_NO_INDEX": "1"}
    with ThreadPoolExecutor(max_workers=len(FIGURES)) as pool:
        yield {
            name: pool.submit(run_notebook, NOTEBOOKS / f"{name}.ipynb", parameters, environment)
            for name, parameters in small_parameters(folder).items() if name in asked
        }


@pytest.fixture(params=FIGURES)
def name(request) -> str:
    return request.param


@pytest.fixture
def stored(name) -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


def outputs_of(notebook) -> list:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def kinds(notebook) -> list[tuple[str, list]]:
    """Of each code cell: its first line, and what its outputs are."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [
        (cell.source.splitlines()[0], [output.get("name") or sorted(output.data) for output in cell.outputs])
        for cell in cells
    ]


def pictures(notebook) -> list[PIL.Image.Image]:
    data = [output.data["image/png"] for output in outputs_of(notebook) if "image/png" in output.get("data", {})]
    return [PIL.Image.open(io.BytesIO(base64.b64decode(item))).convert("RGB") for item in data]


def test_all_notebooks_are_tested():
    assert sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")) == sorted(FIGURES)


def test_stored_outputs_are_whole(name, stored):
    nbformat.validate(stored)
    assert (NOTEBOOKS / f"{name}.ipynb").stat().st_size < MAX_BYTES
    counts = [cell.execution_count for cell in stored.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1)), "a cell was not run, or out of order: store the outputs anew"
    assert not [output for output in outputs_of(stored) if output.output_type == "error"]
    assert not [output for output in outputs_of(stored) if output.get("name") == "stderr"]


def test_stored_figures(name, stored):
    found = pictures(stored)
    assert len(found) == FIGURES[name]
    for picture in found:
        assert picture.width >= 900 and len(picture.getcolors(1 << 24)) > 8, picture  # a blank one has one colour


def test_stored_outputs_tell_nothing_of_a_machine(stored):
    texts = [output.get("text") or output.data.get("text/plain", "") for output in outputs_of(stored)]
    assert [text for text in texts if MACHINE_PATH.search(text)] == []


def test_what_is_imported_is_there(stored):
    sources = [cell.source for cell in stored.cells if cell.cell_type == "code"]
    trees = [ast.parse(re.sub(r"^\s*[%!].*$", "", source, flags=re.MULTILINE)) for source in sources]
    imports = [ast.unparse(node) for tree in trees for node in ast.walk(tree)
               if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "tango_jax"]
    assert imports
    for line in imports:
        namespace = {}
        exec(line, namespace)  # ImportError names what has gone
        assert len(namespace) > 1  # beside `__builtins__`


@pytest.mark.long
@pytest.mark.parametrize("executed", [pytest.param(name, marks=[pytest.mark.release] * (name in RUN_LESS_OFTEN))
                                      for name in FIGURES])
def test_runs_offline_and_agrees_with_what_is_stored(executed, runs):
    found = runs[executed].result()
    assert kinds(found) == kinds(nbformat.read(NOTEBOOKS / f"{executed}.ipynb", as_version=4))
    assert len(pictures(found)) == FIGURES[executed]


@pytest.mark.long
def test_first_cell_outside_a_clone(name, stored, tmp_path):
    setup = stored.cells[1].source
    address = re.search(r'REPOSITORY = "(https://github.com/[^"]+)"', setup)[1]
    alone = run_cell(setup.replace(address, f"file://{tmp_path}/nowhere"), tmp_path)
    assert alone.returncode == 1 and f"{tmp_path}/nowhere" in alone.stderr
    if not (ROOT / ".git").exists() or name != "01_last_letter":
        return
    cloning = run_cell(setup.replace(address, f"file://{ROOT}"), tmp_path)
    assert cloning.returncode == 0, cloning.stderr
    assert cloning.stdout.splitlines()[-1] == "Note: you may need to restart the kernel to use updated packages."
    again = run_cell(setup, tmp_path)  # the clone is found
    assert again.returncode == 0 and (tmp_path / "tango_jax" / "tango_jax" / "train.py").is_file()


def run_cell(source: str, folder: Path) -> subprocess.CompletedProcess:
    environment = {"PATH": os.environ["PATH"], "PIP_NO_INDEX": "1", "GIT_CONFIG_GLOBAL": os.devnull}
    environment |= {"HOME": str(folder)}
    command = [sys.executable, "-m", "IPython", "-c", source]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_stored_report_works_inside_the_notebook(tmp_path):
    """The report in a frame without an address of its own, as a notebook shows it."""
    notebook = nbformat.read(NOTEBOOKS / "01_last_letter.ipynb", as_version=4)
    frame = next(output.data["text/html"] for output in outputs_of(notebook)
                 if "<iframe" in output.get("data", {}).get("text/html", ""))
    (tmp_path / "cell.html").write_text(f"<!doctype html><meta charset=utf-8>{frame}", encoding="utf-8")
    with open_browser(tmp_path / "profile") as page:
        page.driver.get(f"file://{tmp_path}/cell.html")
        page.driver.switch_to.frame(0)
        page.wait("document.body.dataset.ready === 'true'")
        page.click("#tab-rollouts")
        page.wait("document.querySelector('#rollout h2') !== null")
        assert page.text("#rollout h2").startswith("last_letter/")
        assert page.logged() == []
