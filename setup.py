"""The list of packages; everything else is in pyproject.toml, which cannot say that configs/ goes into the package."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["tango_jax*"]), "tango_jax.configs"],
    package_dir={"tango_jax.configs": "configs"},
)
