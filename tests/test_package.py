"""What `pip install` makes of the project: which files, which commands, and what an import of a part of it loads."""

import importlib.metadata
import importlib.util
import inspect
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import pytest

import tango_jax
from tango_jax.tracking.loggers import PACKAGES

ROOT = Path(tango_jax.__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMMANDS = ("train", "sft", "generate", "sample", "export", "evaluate", "judge", "grade", "report", "plan",
            "bench", "ablate")


def run(command: list, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run([str(part) for part in command], cwd=folder, env=os.environ | environment, text=True,
                          capture_output=True, check=False, timeout=300)


# Imports, each in a fresh process.


def modules_after(statement: str) -> list[str]:
    """The modules of this package that a statement loads."""
    code = f"import sys\n{statement}\nprint(*(name for name in sys.modules if name.split('.')[0] == 'tango_jax'))"
    done = run([sys.executable, "-c", code], ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_configuration_is_light():
    assert sorted(modules_after("import tango_jax.config")) == [
        "tango_jax", "tango_jax.config", "tango_jax.defaults", "tango_jax.role_defaults",
        "tango_jax.runtime", "tango_jax.runtime.checks", "tango_jax.runtime.keys", "tango_jax.runtime.model_text",
        "tango_jax.runtime.rng",
    ]


def test_training_loads_no_other_program():
    loaded = modules_after("import tango_jax.train")
    assert "tango_jax.loop.run" in loaded
    rooms = {name.split(".")[1] for name in loaded if "." in name}
    assert rooms.isdisjoint({"evaluation", "viewer", "planning", "notebook", "ablation", *COMMANDS} - {"train"})


# The wheel.


def can_build() -> bool:
    """Whether pip can make a wheel here without the network."""
    try:
        major = int(importlib.metadata.version("setuptools").split(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return False
    return major >= 77 and importlib.util.find_spec("pip") is not None


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    if not can_build():
        pytest.skip("needs pip and setuptools>=77")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    # A copy: setuptools writes build/ into the folder that it builds.
    for name in ("tango_jax", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "requirements.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", source, "--no-deps", "--no-build-isolation", "-w", folder]
    done = run(command, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    [made] = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder with the package, and its commands in bin/; everything else comes from this environment."""
    folder = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", wheel, "--no-deps", "--no-index", "--target", folder]
    done = run(command, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_wheel_holds_all_that_runs(wheel):
    files = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tango_jax").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    }
    # Pages, and their figures, are read in the repository.
    pages = {name for name in package if name.startswith("tango_jax/assets/") or (
        name.endswith(".md") and "/vendor/" not in name)}
    configs = {f"tango_jax/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*")
               if path.is_file() and "__pycache__" not in path.parts}
    assert files == package - pages | configs


def test_the_wheel_asks_for_what_requirements_names(wheel):
    [metadata] = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA")]
    lines = zipfile.ZipFile(wheel).read(metadata).decode().splitlines()
    wanted = [line.split("<")[0].split(">")[0].split("!")[0] for line in
              (ROOT / "requirements.txt").read_text().splitlines() if line and not line.startswith("#")]
    unconditional = [line.removeprefix("Requires-Dist: ") for line in lines
                     if line.startswith("Requires-Dist: ") and "extra ==" not in line]
    assert len(wanted) > 15
    assert [item.split("<")[0].split(">")[0].split("!")[0] for item in unconditional] == wanted
    assert {line for line in lines if line.startswith("Provides-Extra: ")} == {
        "Provides-Extra: test", "Provides-Extra: notebooks", "Provides-Extra: tensorboard", "Provides-Extra: wandb"
    }


def test_a_missing_logger_is_installed_as_the_extra_says():
    for name, (_, requirement) in PACKAGES.items():
        assert PROJECT["optional-dependencies"][name] == [requirement]


def test_every_command_has_a_script(installed):
    assert {path.name for path in (installed / "bin").iterdir()} == {f"tango-{name}" for name in COMMANDS}
    assert PROJECT["scripts"] == {f"tango-{name}": f"tango_jax.{name}:main" for name in COMMANDS}
    for name in COMMANDS:
        [argv] = inspect.signature(importlib.import_module(f"tango_jax.{name}").main).parameters.values()
        assert argv.name == "argv" and argv.default is None


def test_installed_commands_work_in_any_folder(installed, tmp_path):
    def command(name: str, *arguments: str) -> subprocess.CompletedProcess:
        return run([installed / "bin" / name, *arguments], tmp_path, PYTHONPATH=str(installed))

    code = "import tango_jax; from tango_jax.cli.config_file import shipped_configs as s; print(*s().values())"
    done = run([sys.executable, "-c", code], tmp_path, PYTHONPATH=str(installed))
    assert {Path(name).parent for name in done.stdout.split()} == {installed / "tango_jax/configs"}, done.stderr
    done = command("tango-train", "--config=tiny", "--config.seed=-1", "--workdir=run")
    assert done.returncode == 2 and done.stderr.startswith("error: seed=-1 "), done.stderr
    done = command("tango-grade", "--file=none.jsonl")
    assert done.returncode == 2 and "none.jsonl" in done.stderr
    assert not list(tmp_path.iterdir())


def test_an_installed_command_that_is_still_importing_ends_at_once(installed, tmp_path):
    process = subprocess.Popen([installed / "bin/tango-train", "--config=tiny", f"--workdir={tmp_path / 'run'}"],
                               cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(installed)}, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        while not catches_sigterm(process.pid):
            assert process.poll() is None
            time.sleep(0.001)
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=100)
    finally:
        process.kill()
    assert (process.returncode, stdout) == (75, "")
    assert stderr.startswith("told to stop (SIGTERM)") and stderr.count("\n") == 1


def catches_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:")).split()[1]
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)
