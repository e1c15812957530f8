"""Writes the table of published measurements anew into planning/README.md: PYTHONPATH=tests python -m
support.published_table"""

from support.paths import ROOT
from tango_jax.planning.fitted import table_rows

PAGE = ROOT / "tango_jax/planning/README.md"
HEAD = "| kind | of | on | model | measured | predicted | ratio | |\n|---|---|---|---|---|---|---|---|\n"


def main() -> None:
    before, after = PAGE.read_text(encoding="utf-8").split(HEAD)
    rest = "\n".join(line for line in after.splitlines() if not line.startswith(("| update", "| score", "| prefill",
                                                                                 "| sample", "| decode", "| step")))
    table = "".join("| " + " | ".join(row) + " |\n" for row in table_rows())
    PAGE.write_text(f"{before}{HEAD}{table}{rest}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
