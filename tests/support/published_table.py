"""Writes the table of published measurements anew into planning/README.md.

PYTHONPATH=tests python -m support.published_table
"""

import itertools

from support.paths import ROOT
from tango_jax.planning.fitted import table_rows

PAGE = ROOT / "tango_jax/planning/README.md"
HEAD = "| kind | of | on | model | measured | predicted | ratio | |\n|---|---|---|---|---|---|---|---|\n"


def main() -> None:
    before, after = PAGE.read_text(encoding="utf-8").split(HEAD)
    rest = itertools.dropwhile(lambda line: line.startswith("|"), after.splitlines(keepends=True))
    table = "".join("| " + " | ".join(row) + " |\n" for row in table_rows())
    PAGE.write_text(before + HEAD + table + "".join(rest), encoding="utf-8")


if __name__ == "__main__":
    main()
