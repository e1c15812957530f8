"""The collectives of a compiled program, from its HLO text.

A loop of known length multiplies what is inside it. The loop over micro-batches (of an update) or steps (of a decode)
has a length that only the data tell: what is inside is counted for one pass.
"""

import math
import re

from tango_jax.planning.traffic import Collective

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
_BYTES = {"pred": 1, "bf16": 2, "f16": 2}  # the other types carry their bits in their name: f32, s8, f8e4m3fn
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\) -> .*\{$")
_COLLECTIVE = re.compile(rf"^\s+(?:ROOT )?%?[\w.-]+ = (.+?) ({'|'.join(KINDS)})(-start)?\(")
_CALLED = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_WHILE = re.compile(r" while\(.*condition=%?([\w.-]+), body=%?([\w.-]+)")
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_SHAPE = re.compile(r"\b([a-z]+\d*[a-z\d]*)\[([\d,]*)\]")
_PRODUCT = re.compile(r" (?:dot|convolution)\(|custom_call_target=\"__cu(?:blas|dnn)")
_GATHER = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = .+? all-gather(-start)?\(")
_GATHERED = re.compile(r" all-gather-done\(.*?%?([\w.-]+)\)")
_COMPARED = re.compile(r"ROOT .* compare\(%?([\w.-]+), %?([\w.-]+)\), direction=LT")


def collectives(text: str, num_devices: int) -> list[Collective]:
    """Those of a module's text in which more than one device takes part, in the order of the text."""
    bodies, entry = _computations(text)
    found, pending = [], [(entry, 1, 0)]
    while pending:
        name, times, unknown = pending.pop()  # how many loops of unknown length it is in
        for line in bodies[name]:
            if match := _COLLECTIVE.search(line):
                assert unknown <= 1, f"in a loop of unknown length inside another one: {line[:200]}"
                item = _collective(line, match, times, unknown == 1, num_devices)
                found += [item] if len(item.members) > 1 else []
            elif match := _WHILE.search(line):
                condition, body = match.groups()
                trips = _trip_count(line, bodies[condition])
                pending.append((body, times * (trips or 1), unknown + (trips is None)))
            else:
                called = _CALLED.findall(line)
                for branches in _BRANCHES.findall(line):
                    called += re.findall(r"%?([\w.-]+)", branches)
                pending += [(inner, times, unknown) for inner in called if inner in bodies]
    return found


def gathers_beside_products(text: str) -> tuple[int, int]:
    """Of the gathers in loops of known length (over layers): how many have a product between their start and their end,
    in the order of the schedule, and how many there are."""
    bodies, _ = _computations(text)
    loops = [match.group(2) for lines in bodies.values() for line in lines
             if (match := _WHILE.search(line)) and _trip_count(line, bodies[match.group(1)])]
    with_products = {name for name, lines in bodies.items() if any(map(_PRODUCT.search, lines))}
    beside, count = 0, 0
    for lines in (bodies[name] for name in dict.fromkeys(loops)):
        pending: dict[str, bool] = {}  # by gather: whether a product has come since
        for line in lines:
            if match := _GATHER.search(line):
                count += 1
                pending |= {match.group(1): False} if match.group(2) else {}
            elif match := _GATHERED.search(line):
                beside += pending.pop(match.group(1))
            elif _PRODUCT.search(line) or with_products.intersection(_CALLED.findall(line)):
                pending = dict.fromkeys(pending, True)
    return beside, count


def wire_bytes_by_kind(found: list[Collective], passes: float, calls: int = 1) -> dict[str, float]:
    """{kind: bytes} that a device receives in `calls` calls of a function, with `passes` passes in all of them."""
    total = {}
    for item in found:
        total[item.kind] = total.get(item.kind, 0.0) + item.wire_bytes * (passes if item.in_pass else calls)
    return total


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Lines of each computation by its name, and the name of the one that the program starts with."""
    bodies, entry, lines = {}, "", None
    for line in text.splitlines():
        if lines is None:
            if header := _COMPUTATION.match(line):
                lines = bodies.setdefault(header.group(2), [])
                entry = header.group(2) if header.group(1) else entry
        elif line == "}":
            lines = None
        else:
            lines.append(line)
    return bodies, entry


def _trip_count(line: str, condition: list[str]) -> int | None:
    """Passes of a loop: as XLA says, or the constant that its counter is compared with; None where it varies."""
    if known := _TRIPS.search(line):
        return int(known.group(1))
    for compared in filter(None, map(_COMPARED.search, condition)):
        limit = re.compile(rf"%?{re.escape(compared.group(2))} = s32\[\]\S* constant\((\d+)\)")
        for match in filter(None, map(limit.search, condition)):
            return int(match.group(1))
    return None


def _collective(line: str, match: re.Match, times: int, in_pass: bool, num_devices: int) -> Collective:
    shape, kind, is_start = match.groups()
    count = group_size(line, num_devices)
    if kind == "collective-permute":
        count = 2 if re.search(r"source_target_pairs=\{\{(\d+),(?!\1\})", line) else 1
    # An asynchronous one names its operands first and its results next, but for all-reduce.
    if is_start and kind != "all-reduce":
        shape = _top_level(shape)[1]
    size = shape_bytes(shape) * (count if kind == "reduce-scatter" else 1)
    return Collective(kind, size, tuple(range(count)), times, in_pass)


def _top_level(shape: str) -> list[str]:
    """The elements of a tuple's shape."""
    parts, depth = [""], 0
    for character in shape.strip()[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def shape_bytes(shape: str) -> int:
    """Bytes of all arrays in a shape's text."""
    total = 0
    for dtype, sizes in _SHAPE.findall(re.sub(r"\{[^}]*\}", "", shape)):
        bits = re.search(r"\d+", dtype)
        width = _BYTES.get(dtype) or int(bits.group()) // 8
        total += width * math.prod(int(size) for size in sizes.split(",") if size)
    return total


def group_size(line: str, num_devices: int) -> int:
    """Devices of a replica group, in any of the three forms that XLA prints."""
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return listed.group(1).count(",") + 1
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=", line):
        return int(iota.group(1))
    if mesh := re.search(r"replica_groups=mesh\[(.*?)\].*? \{(.*?)\}", line):
        sizes = dict(re.findall(r"'([^']*)'=(\d+)", mesh.group(1)))
        return math.prod(int(sizes[name]) for name in re.findall(r"'([^']*)'", mesh.group(2)))
    return num_devices
