"""Packs rollouts for the page: small columns for filtering, and chunks (base64 of gzip) for everything else.

A chunk of n rollouts has 2n lines: the texts of each rollout as a JSON list, then each rollout without its texts. A
search reads only the first n lines.
"""

import base64
import gzip
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tango_jax.config import ROLES
from tango_jax.grading import why_misaligned
from tango_jax.tracking.scores import VERDICTS

CHUNK = 64  # rollouts; small enough to decode within a key press, large enough to compress well
LABEL = 72  # characters of the question shown in the list
COLUMNS = ("run", "turn", "row", "group", "role", "flagged", "severity", "correct", "verdict", "steps", "adv", "reward")
ROLLOUT_ROLES = (*ROLES, "evaluation")  # evaluations are greedy, without reward and advantage
FLAGS = {  # filter of bit 0, ... -> label, and how much it misleads the generator
    "false_accept": ("false accept", 32), "false_reject": ("false reject", 16), "invalid": ("INVALID", 8),
    "misaligned": ("misaligned", 2), "truncated": ("truncated", 1), "misjudged": ("misjudged step", 4),
    "wrong_steps": ("right verdict, wrong steps", 8),
}
MEANINGS = ("false_accept", "false_reject", "invalid", "wrong_steps")  # what a verdict means


class Packed(NamedTuple):
    run: int
    group: tuple  # kept or left out together: the samples of a prompt, or the problems of an evaluation
    columns: dict  # name -> integer
    label: str
    problem: tuple[str, str]  # (id, question): seeds may have different problems with one id
    texts: bytes
    rest: bytes


def pack_rollout(run: int, rollout: dict) -> Packed:
    solution, verifications, role = rollout["solution"], rollout["verifications"], rollout["role"]
    problem, advantage, reward = rollout["problem"], rollout["advantage"], rollout["reward"]
    first = verifications[0] if verifications else None
    values = [value for _, value, _ in advantage["total"]] if advantage else []
    flags = flags_of(rollout)
    columns = {
        "run": run,
        "turn": rollout["turn"],
        "row": rollout["row"],
        "group": rollout["group"],
        "role": ROLLOUT_ROLES.index(role),
        "flagged": sum(1 << bit for bit, name in enumerate(FLAGS) if name in flags),
        "severity": sum(FLAGS[name][1] for name in flags),
        "correct": int(solution["is_correct"]),
        "verdict": [*VERDICTS].index(first["verdict"]) if first else len(VERDICTS),
        "steps": len(solution["steps"]),
        "adv": round(1000 * max(values, key=abs, default=0.0)),
        "reward": round(1000 * (reward["total"] if reward else solution["is_correct"])),
    }
    texts = [problem["id"], problem["question"], problem["answer"], solution["text"],
             *(item["text"] for item in verifications)]
    rest = rollout | {
        "problem": {"size": problem["size"]},
        "solution": {name: value for name, value in solution.items() if name != "text"},
        "verifications": [
            {name: value for name, value in item.items() if name != "text"} | {"told": _told(solution, item)}
            for item in verifications
        ],
    }
    question = " ".join(problem["question"].split())
    label = question if len(question) <= LABEL else question[: LABEL - 1] + "…"
    group = (run, rollout["turn"], role, 0 if role == "evaluation" else rollout["group"])
    return Packed(run, group, columns, label, (problem["id"], problem["question"]), _json(texts), _json(rest))


def flags_of(rollout: dict) -> set[str]:
    solution = rollout["solution"]
    flags = {"truncated"} if solution["is_truncated"] else set()
    return flags.union(*(_flags(solution, item) for item in rollout["verifications"]))


def _flags(solution: dict, item: dict) -> set[str]:
    right, verdict = solution["is_correct"], item["verdict"]
    pairs = zip(item["judgements"], solution["gold_steps"] or (), strict=False)
    is_misjudged = any(mark is not None and mark != label for mark, label in pairs)
    found = {
        "false_accept": verdict == "CORRECT" and not right,
        "false_reject": verdict == "INCORRECT" and right,
        "invalid": verdict == "INVALID",
        "misaligned": not item["is_aligned"],
        "truncated": item["is_truncated"],
        "misjudged": item["is_aligned"] and is_misjudged,
        "wrong_steps": item["is_aligned"] and is_misjudged and verdict == ("CORRECT" if right else "INCORRECT"),
    }
    return {name for name, is_so in found.items() if is_so}


def _told(solution: dict, item: dict) -> dict:
    flags = _flags(solution, item)
    meaning = next((FLAGS[name][0] for name in MEANINGS if name in flags), "")
    why = why_misaligned(tuple(item["judgements"]), len(solution["steps"])) if "misaligned" in flags else ""
    return {"meaning": meaning or "verdict and grade agree", "agrees": not meaning, "why": why}


def columns_of(packed: Sequence[Packed], chunk: int = CHUNK) -> dict:
    labels, problems = {}, {}
    places = [labels.setdefault(item.label, len(labels)) for item in packed]
    columns = {name: [item.columns[name] for item in packed] for name in COLUMNS}
    columns |= {"label": places, "problem": [problems.setdefault(item.problem, len(problems)) for item in packed]}
    columns |= {"labels": list(labels), "ids": [name for name, _ in problems]}
    return columns | {"chunk": chunk, "flags": {name: label for name, (label, _) in FLAGS.items()}}


def chunks_of(packed: Sequence[Packed], chunk: int = CHUNK) -> Iterator[str]:
    for start in range(0, len(packed), chunk):
        group = packed[start : start + chunk]
        yield encode(b"\n".join([item.texts for item in group] + [item.rest for item in group]))


def thin_out(packed: Sequence[Packed], fraction: float) -> list[Packed]:
    """About this fraction of the rollouts: of training whole groups, of every evaluation the same problems."""
    kept, owed = [], 0.0
    for _, items in itertools.groupby(packed, lambda item: item.group):
        group = list(items)
        if group[0].columns["role"] == ROLLOUT_ROLES.index("evaluation"):
            kept += [item for i, item in enumerate(group) if int((i + 1) * fraction) > int(i * fraction)]
            continue
        owed += fraction * len(group)
        if owed >= len(group):
            owed -= len(group)
            kept += group
    return kept


def encode(data: bytes) -> str:
    """Gzip and base64, without a timestamp: the same runs give the same page."""
    return base64.b64encode(gzip.compress(data, compresslevel=6, mtime=0)).decode()


def encode_json(value: Any) -> str:
    return encode(_json(value))


def _json(value: Any) -> bytes:
    # Not escaped: searches match the text as typed. Lone surrogates cannot be encoded and are replaced.
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
