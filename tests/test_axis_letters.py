"""The axis letters in the names of arrays, and the jitted functions, against what the README says of them."""

import ast
import re

from support.paths import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "tango_jax"
# Not part of a run: they measure a machine.
MEASURING = {"bench.py", "runtime/machine.py"}


def legend() -> dict[str, str]:
    [block] = [text for text in README.split("```") if text.lstrip().startswith("B  rows")]
    return dict(re.findall(r"(?<!\S)([A-Z])  (\S+(?: \S+)*)", block))


def suffixes() -> dict[str, set[str]]:
    """suffix -> the names that end in it: those of variables, arguments and fields."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = {ast.Name: "id", ast.arg: "arg", ast.Attribute: "attr", ast.FunctionDef: "name"}.get(type(node))
            match = re.fullmatch(r"\w*[a-z]\w*_((?=\d*[A-Z])[A-Z1]+)", getattr(node, name)) if name else None
            if match:
                found.setdefault(match[1], set()).add(f"{path.relative_to(PACKAGE)}: {match[0]}")
    return found


def test_every_letter_is_in_the_legend():
    letters, found = legend(), suffixes()
    unknown = {suffix: names for suffix, names in found.items() if set(suffix) - {"1"} - set(letters)}
    assert unknown == {}
    used = {letter for suffix in found for letter in suffix}
    assert len(found) > 60 and set(letters) - used == {"L"}  # the leading axis of stacked layers


def test_a_letter_that_the_legend_lacks_is_found():
    assert set("JA") & set(legend()) == set()
    assert legend()["B"].startswith("rows, P x M") and legend()["Y"].startswith("queries")


def test_no_other_name_hides_the_number_of_prompts():
    """`P` as an alias of PartitionSpec stands in no file that counts prompts by the same name."""
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "PartitionSpec as P" in text:
            tree = ast.parse(text)
            stored = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "P"
                      and isinstance(node.ctx, ast.Store)]  # fmt: skip
            assert stored == [], path


def test_the_jitted_functions_are_those_of_the_readme():
    table = README[README.index("| jitted | in |") :].split("\n\n")[0]
    told = set()
    for row in table.splitlines()[2:]:
        folder = ""
        for name in re.findall(r"`([\w/]+\.py)`", row.split("|")[2]):
            folder = name.rpartition("/")[0] or folder
            told.add(f"{folder}/{name.rpartition('/')[2]}")
    jits = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")
            if re.search(r"\bjax\.jit\b", path.read_text(encoding="utf-8"))}  # fmt: skip
    assert told == jits - MEASURING
