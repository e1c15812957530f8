"""launch/_env.sh: a .venv is made, filled and repaired once each, and quickly done when nothing has changed.

A project with one made-up package for each part stands in for this one; its wheels come from a folder.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import tango_jax

ROOT = Path(tango_jax.__file__).parents[1]


def write_wheel(folder: Path, name: str) -> None:
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")


@pytest.fixture
def project(tmp_path) -> Path:
    (tmp_path / "launch").mkdir()
    (tmp_path / "wheels").mkdir()
    shutil.copy(ROOT / "launch/_env.sh", tmp_path / "launch")
    (tmp_path / "requirements.txt").write_text("# a comment\nmade-up-base==1.0\n")
    (tmp_path / "pyproject.toml").write_text(
        '[project.optional-dependencies]\ntest = [\n    "made.up_test>=1",  # a comment\n]\nmore = ["made-up-more"]\n'
    )
    for name in ("made_up_base", "made_up_test"):
        write_wheel(tmp_path / "wheels", name)
    return tmp_path


def bash(project: Path, script: str, **changes: str) -> subprocess.CompletedProcess:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TANGO_", "PIP_", "PYTHON"))}
    kept |= {"PYTHON": sys.executable, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(project / "wheels")}
    return subprocess.run(["bash", "-c", f"set -euo pipefail; source launch/_env.sh; {script}"], cwd=project,
                          env=kept | changes, text=True, capture_output=True, check=False, timeout=300)


def said(done: subprocess.CompletedProcess) -> list[str]:
    """What was installed."""
    return re.findall(r"installing (.*) into \.venv", done.stderr)


@pytest.mark.long
def test_everything_is_installed_once_and_repaired(project):
    done = bash(project, "python -c 'import made_up_base'")
    assert done.returncode == 0, done.stderr
    assert said(done) == ["requirements.txt"]  # the quickstart needs no more
    done = bash(project, "install_extras test && python -c 'import made_up_base, made_up_test'")
    assert done.returncode == 0, done.stderr
    assert said(done) == ["the extras test"]
    assert bash(project, "install_extras test").stderr == ""

    # The wheel of another extra is missing: nothing counts as installed, and the next run tries again.
    for _ in range(2):
        done = bash(project, "install_extras test more")
        assert done.returncode == 1 and said(done) == ["the extras test, more"]
        assert "error: pip could not install the extras test, more; the reason is above" in done.stderr
    write_wheel(project / "wheels", "made_up_more")
    done = bash(project, "install_extras test more && python -c 'import made_up_more'")
    assert done.returncode == 0 and said(done) == ["the extras test, more"], done.stderr
    assert bash(project, "install_extras test more; install_extras test").stderr == ""

    # Changed requirements are installed; what is unchanged is not.
    (project / "requirements.txt").write_text("made-up-base>=1\n")
    assert said(bash(project, "install_extras test")) == ["requirements.txt"]


@pytest.mark.long
def test_an_environment_beside_the_usual_one(project):
    done = bash(project, "command -v python", TANGO_VENV=".venv-second")
    assert (done.returncode, done.stdout) == (0, f"{project}/.venv-second/bin/python\n"), done.stderr
    assert not (project / ".venv").exists()


@pytest.mark.parametrize("name", ["/", "runs", "../.venv", ".venv/../runs"])
def test_an_environment_replaces_no_other_folder(project, name):
    (project / "runs").mkdir()
    done = bash(project, "true", TANGO_VENV=name)
    assert done.returncode == 1 and f"TANGO_VENV={name} must be the name of a folder in {project}" in done.stderr
    assert (project / "runs").exists() and not list(project.glob(".venv*"))


def test_an_extra_that_does_not_exist_is_named(project):
    done = bash(project, "install_extras tset", TANGO_PYTHON=sys.executable)
    assert done.returncode == 1 and "error: cannot read the extras tset from pyproject.toml" in done.stderr


def test_a_ready_environment_needs_the_test_tools(project):
    """Nothing is installed there: it is not this project's."""
    (project / "pyproject.toml").write_text(
        '[project.optional-dependencies]\ntest = ["Made.Up>=1", "PyTest>=9", "also-made-up<3"]\n'
    )
    done = bash(project, "install_extras test", TANGO_PYTHON=sys.executable)
    assert done.returncode == 1 and not (project / ".venv").exists()
    assert done.stderr == (
        f"tango_jax: error: TANGO_PYTHON={sys.executable} lacks Made.Up, also-made-up. Install them "
        f"({sys.executable} -m pip install -e '{project}[test]'), or unset TANGO_PYTHON to have .venv made.\n"
    )
    (project / "pyproject.toml").write_text('[project.optional-dependencies]\ntest = ["PyTest>=9"]\n')
    done = bash(project, "install_extras test; command -v python", TANGO_PYTHON=sys.executable)
    assert (done.returncode, done.stdout) == (0, f"{Path(sys.executable).parent}/python\n"), done.stderr


def test_the_scripts_name_extras_that_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {
        path.name: re.findall(r"^install_extras (.+)$", path.read_text(), re.MULTILINE)
        for path in (ROOT / "launch").glob("*.sh")
    }
    assert named["test.sh"] == [" ".join(extras)] and named["quickstart.sh"] == []
    assert all(set(line.split()) <= set(extras) for lines in named.values() for line in lines)


def test_the_script_of_continuous_integration():
    script = ROOT / ".ci/run"
    tool = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    done = subprocess.run([tool, "--external-sources", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    names = re.search(r"^short_part=\((.+)\)$", script.read_text(), re.MULTILINE)[1].split()
    assert len(names) > 2
    assert all(len(list((ROOT / "tests").rglob(f"{name}.py"))) == 1 for name in names)
