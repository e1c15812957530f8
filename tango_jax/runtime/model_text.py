r"""Text that models and data files wrote, made safe to show to a person: on a terminal, in a log, in Markdown.

In: any string. Out: a string that only says what it says. Whatever could move a cursor, recolour a terminal, reorder or
hide letters, or end the block that the text stands in is shown as an escape such as \x1b or \u202e; letters, blanks
and LaTeX stay as they are. A backslash is not doubled, for the sake of LaTeX, so what is shown cannot always be turned
back: rollouts/*.jsonl has the text as it was sampled. Applied twice, `for_terminal` changes nothing more. Stage:
wherever a command prints or writes for people; JSON files are data and keep the text itself. The report's page does
the same in its own script (viewer/text.js).
"""

import re
import unicodedata

# Characters without a shape of their own that Python counts as printable: joiners, fillers, variation selectors
# (Unicode's Default_Ignorable_Code_Point without the categories that `_is_shown` refuses anyway).
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
_LINE_SIGNS = str.maketrans({"\n": "↵", "\t": "→"})


def for_terminal(text: str, encoding: str = "utf-8") -> str:
    r"""Text for a terminal or a log file; only newlines and tabs remain of what is no letter, sign or blank.

    Escaped are controls (C0 but \n and \t, DEL, C1), format characters (bidi overrides, zero-width joiners, tags), line
    and paragraph separators, invisible fillers, lone surrogates, private and unassigned code points, and what
    `encoding`, that of the stream, cannot write.
    """
    shown = _escaped(text)
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def on_one_line(text: str, encoding: str = "utf-8") -> str:
    """The same for a cell of a table: newlines and tabs are blanks."""
    return for_terminal(re.sub(r"[\n\t]", " ", text), encoding)


def error_line(error: object) -> str:
    """`error: ...` as one line: what an error quotes of a file or a model's text cannot forge a second one."""
    return on_one_line(f"error: {error}")


def markdown_fence(text: str) -> str:
    """A fenced code block that holds the text and that nothing in the text can end; it stands on lines of its own."""
    shown = _escaped(text)
    fence = "`" * max(3, _longest_run(shown) + 1)
    return f"{fence}text\n{shown}\n{fence}"


def markdown_code(text: str) -> str:
    """A code span, for the middle of a line: newlines are shown as ↵ and tabs as →. It holds no markup or HTML."""
    shown = _escaped(text).translate(_LINE_SIGNS)
    if not shown.strip(" "):
        return f"`{shown or ' '}`"  # no code span is empty
    ticks = "`" * (_longest_run(shown) + 1)
    # A backtick at an end would join the delimiter. A blank at both ends is taken away by the renderer.
    blank = " " if shown[0] in " `" or shown[-1] in " `" else ""
    return f"{ticks}{blank}{shown}{blank}{ticks}"


def markdown_cell(text: str) -> str:
    """A code span for a cell of a Markdown table, where a pipe would begin the next cell if it were not escaped."""
    return markdown_code(text).replace("|", r"\|")


def _escaped(text: str) -> str:
    if text.isprintable() and not _INVISIBLE.search(text):
        return text
    return "".join(char if char in "\n\t" or _is_shown(char) else _escape(char) for char in text)


def _is_shown(char: str) -> bool:
    # isprintable refuses every blank but the ASCII one; the others take room and appear in ordinary prose.
    return (char.isprintable() or unicodedata.category(char) == "Zs") and not _INVISIBLE.match(char)


def _escape(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)
