r"""Makes text from models and data files safe to display: on a terminal, in a log, in Markdown.

What could steer the terminal, reorder or hide letters, or end the enclosing block becomes an escape such as \x1b or
\u202e. Backslashes are not doubled, for LaTeX. viewer/text.js has the same rules.
"""

import re
import unicodedata

# Invisible characters that Python counts as printable (Unicode's Default_Ignorable_Code_Point).
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
_LINE_SIGNS = str.maketrans({"\n": "↵", "\t": "→"})


def for_terminal(text: str, encoding: str = "utf-8") -> str:
    return _escaped(text).encode(encoding, "backslashreplace").decode(encoding)


def on_one_line(text: str, encoding: str = "utf-8") -> str:
    """`for_terminal` with blanks for newlines and tabs."""
    return for_terminal(re.sub(r"[\n\t]", " ", text), encoding)


def error_line(error: object) -> str:
    """One line: quoted text cannot forge a second one."""
    return on_one_line(f"error: {error}")


def markdown_fence(text: str) -> str:
    shown = _escaped(text)
    fence = "`" * max(3, _longest_run(shown) + 1)
    return f"{fence}text\n{shown}\n{fence}"


def markdown_code(text: str) -> str:
    """A code span in a line, with ↵ for newlines and → for tabs."""
    shown = _escaped(text).translate(_LINE_SIGNS)
    if not shown.strip(" "):
        return f"`{shown or ' '}`"  # a code span cannot be empty
    ticks = "`" * (_longest_run(shown) + 1)
    # A backtick at an end would merge with the delimiter. Renderers strip one blank from both ends.
    blank = " " if shown[0] in " `" or shown[-1] in " `" else ""
    return f"{ticks}{blank}{shown}{blank}{ticks}"


def markdown_cell(text: str) -> str:
    return markdown_code(text).replace("|", r"\|")


def _escaped(text: str) -> str:
    if text.isprintable() and not _INVISIBLE.search(text):
        return text
    return "".join(char if char in "\n\t" or _is_shown(char) else _escape(char) for char in text)


def _is_shown(char: str) -> bool:
    # isprintable rejects all blanks but the ASCII one; others occur in prose.
    return (char.isprintable() or unicodedata.category(char) == "Zs") and not _INVISIBLE.match(char)


def _escape(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)
