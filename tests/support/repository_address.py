"""Copies the address of the repository from pyproject.toml into the notebooks' links, and the README's if it has any:

    PYTHONPATH=tests python -m support.repository_address

Colab opens a notebook by an address that has to stand in full in the link, and so does what its first cell clones. The
one place to fill it in is `Repository` under [project.urls].
"""

import re
import tomllib
from pathlib import Path

from support.notebook_runs import NOTEBOOKS
from support.paths import ROOT

HOST, COLAB = "https://github.com/", "https://colab.research.google.com/github/"
NAME = r"[\w.-]+/[\w.-]+"
PLACES = (ROOT / "README.md", *sorted(NOTEBOOKS.glob("*.ipynb")))


def repository_name() -> str:
    """The owner and the name of the repository, as in its address at GitHub."""
    address = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]
    assert re.fullmatch(HOST + NAME, address), f"pyproject.toml: Repository={address!r} must be {HOST}OWNER/NAME"
    return address.removeprefix(HOST)


def with_address(text: str, name: str) -> str:
    """The text of a file with this repository's links in place of others."""
    text = re.sub(re.escape(COLAB) + NAME + "/", f"{COLAB}{name}/", text)
    return re.sub(r'(REPOSITORY = \\?")' + re.escape(HOST) + NAME, rf"\g<1>{HOST}{name}", text)


def main() -> None:
    for path in PLACES:
        path.write_text(with_address(path.read_text(encoding="utf-8"), repository_name()), encoding="utf-8")
        print(f"{Path(path).relative_to(ROOT)}: {repository_name()}")


if __name__ == "__main__":
    main()
