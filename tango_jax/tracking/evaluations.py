"""The table of an experiment: one CSV row for every evaluation of every run.

Six columns hold digests that say which runs compare. An empty digest was not recorded, and compares with all. The last
column holds the stored record of an arm that is not built in, as JSON.
"""

import csv
import hashlib
import io
import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from tango_jax.config import ROLES, default_config, flatten
from tango_jax.method.arms import ARMS, Arm
from tango_jax.method.own_arm import arm_name, read_arm
from tango_jax.runtime.atomic import write_atomically
from tango_jax.runtime.checks import local_path, shortened
from tango_jax.runtime.model_text import on_one_line
from tango_jax.tracking.known_arms import record_of
from tango_jax.tracking.metrics import TURN_PHASES
from tango_jax.tracking.provenance import is_of_arm, method_digests, read_provenance, weights_digest
from tango_jax.tracking.run_config import ENDING, changes_results, without_folder
from tango_jax.tracking.turn_metrics import tokens_sampled, tokens_scored
from tango_jax.weights.source import NUMERICS
from tango_jax.weights.workdir import BASE


class Evaluation(NamedTuple):
    task: str
    setting: str  # the cell of the grid, without its start; empty without a grid
    start: int  # task.data_seed: the problems of stage 1 and of the test
    arm: str
    seed: int
    turn: int  # of the schedule, of both roles, before it; of a warm-up that ended early, all that it could have
    generator_step: int  # generator turns before it
    sampled_tokens: int  # by both roles in training, with resampled groups
    seconds: float  # of training, without evaluations
    accuracy: float  # greedy, on held-out problems
    verifier_step_f1: float | None  # greedy, on the fixed pool
    verifier_outcome_f1: float | None
    # Of the generator's turn after the evaluation, or of the last turn:
    sampled_accuracy: float | None = None  # of sampled solutions, on training problems
    verifier_live_step_f1: float | None = None  # of their judgements in the turn; None in the warm-up
    groups_without_signal: float | None = None
    alpha: float | None = None  # weight of the step rewards
    steps_mean: float | None = None  # steps of a sampled solution
    # Approved share of the steps that have rewards, by their marks; None if verifications leave steps or solutions out,
    # or rewards are probabilities.
    steps_approved: float | None = None
    verifier_live_accept_gap: float | None = None  # tracking/scores.py, aligned verifications; None in the warm-up
    verifier_first_error_f1: float | None = None  # of the evaluation, as verifier_step_f1
    # Of the turns before it, as `sampled_tokens`:
    scored_tokens: int | None = None  # read by a verifier that does not write
    flops: float | None = None  # of rollouts and updates, without padding (tracking/turn_flops.py)
    setup: str = ""  # `setup_of` the run
    method: str = ""  # `method_of` the run
    problems: str = ""  # contents of the files of problems and prompts
    generator_start: str = ""  # weights at the start of reinforcement learning
    verifier_start: str = ""
    weights: str = ""  # checkpoint and adapter of each role before stage 1 (tracking/provenance.py weights_digest)
    source: str = ""  # of tango_jax: a digest for each start of the run; empty: not recorded
    arm_record: str = ""  # `stored_arm`, which says how to draw and compare the arm; empty: the arm is built in


class Sources(NamedTuple):
    start: Mapping[str, str] = {}  # role, "problems" and "templates" -> digest (loop/resume.py fingerprints_of)
    files: Mapping[str, str] = {}  # setting -> digest of the user's file that it names
    weights: str = ""  # `weights_digest`
    source: str = ""
    arm_record: str = ""


_NO_SOURCES = Sources()
_DIGESTS = ("setup", "method", "problems", "generator_start", "verifier_start", "weights")
_TEXTS = ("task", "setting", "arm", *_DIGESTS, "source", "arm_record")
_COLUMNS = ("arm", "seed", "task.data_seed", "verifier.adapter")  # told in columns; the last one in `method`
_SETUP = ("task.", "self.", "eval.", "rl.prompts_per_step", "rl.samples_per_prompt",
          *(f"{role}.{group}" for role in ROLES for group in (
              "checkpoint", "model.", "sft.", "template", "stop_at_first_error", "use_chat", "max_prompt",
              "max_response")))
OTHER_PROBLEMS = "their files differ, or others were left out because of their length"
SETUP_IN_WORDS = ("other problems, another model, stage 1 or prompt, or turns of another size (task.*, self.*, eval.*, "
                  "rl.prompts_per_step, rl.samples_per_prompt, and of a role checkpoint, model.*, sft.*, template, "
                  "stop_at_first_error, use_chat, max_prompt or max_response)")
_COUNTS = ("start", "seed", "turn", "generator_step", "sampled_tokens", "scored_tokens")
_OPTIONAL = tuple(Evaluation._field_defaults)
_MAY_BE_EMPTY = ("verifier_step_f1", "verifier_outcome_f1", *_OPTIONAL)
UNKNOWN_BETWEEN = tuple(name for name in _MAY_BE_EMPTY if name not in _TEXTS)  # where a row is interpolated


def evaluations_of(
    metrics: Sequence[Mapping], config: ConfigDict, setting: str, sources: Sources = _NO_SOURCES
) -> list[Evaluation]:
    found, tokens, scored, flops, seconds = [], 0, 0, 0.0, 0.0
    contents = [sources.start[name] for name in ("problems", "templates") if name in sources.start]
    digests = (setup_of(config, sources.files), method_of(config, sources.files), _digest(contents) if contents else "",
               *(_start_of(role, config, sources.start) for role in ROLES), sources.weights,
               sources.source, sources.arm_record)
    arm = read_arm(json.loads(sources.arm_record)) if sources.arm_record else ARMS.get(config.arm)
    # A task labels all steps, by +1 and -1, whatever a verifier would do.
    has_all_marks = (arm is not None and arm.needs_gold_steps
                     or not config.verifier.stop_at_first_error and config.rl.step_reward == "mark")
    for index, row in enumerate(metrics):
        if row["phase"] in TURN_PHASES:
            tokens, scored = tokens + tokens_sampled(row), scored + tokens_scored(row)
            # Runs of earlier versions have no FLOPs.
            flops += row.get("flops/rollout", np.nan) + row.get("flops/training", np.nan)
            seconds += row["time/turn_s"]
            continue
        turn = _turn_beside(metrics, index)
        is_warmup_ahead = any(later["phase"] == "warmup" for later in metrics[index:])
        found.append(Evaluation(
            task_name(config.task.name), setting, config.task.data_seed, arm_name(config.arm), config.seed, row["step"],
            row["generator_step"], int(tokens), seconds, row["generator/accuracy"], row.get("verifier/pool/step_f1"),
            row.get("verifier/pool/outcome_f1"), turn.get("generator/reward/outcome"),
            None if is_warmup_ahead else turn.get("verifier/live_step_f1"),
            turn.get("generator/groups_without_signal"), turn.get("generator/alpha"), turn.get("generator/steps_mean"),
            turn.get("generator/steps_approved") if has_all_marks and not _selects(turn) else None,
            None if is_warmup_ahead else turn.get("verifier/live_accept_gap"),
            row.get("verifier/pool/first_error_f1"), int(scored), None if np.isnan(flops) else flops, *digests,
        ))
    return found


def task_name(task: str) -> str:
    """A file's without its folder: `setup` holds a digest of what is in it."""
    return PurePath(task).name


def _start_of(role: str, config: ConfigDict, start: Mapping[str, str]) -> str:
    name = role if adapters_are_trained(flatten(config)) else f"{role}{BASE}"
    return start.get(name, start.get(role, ""))[:12]


def adapters_are_trained(settings: Mapping[str, Any]) -> bool:
    """Before reinforcement learning, as a fork's are. Fresh adapters count by their base alone: B is 0, and the random
    A differs between one policy and two. After a stage 1 of all parameters they are fresh, too."""
    def is_trained(role: str) -> bool:
        steps, init_from, is_full = (settings.get(f"{role}.{key}") for key in ("sft.steps", "init_from", "sft.full"))
        has_stage_one = (steps or init_from) and not (steps and is_full)
        return bool(has_stage_one) or settings.get(f"{role}.adapter", "") not in ("", "generator")

    return bool(settings.get("fork_of")) or any(map(is_trained, ROLES))


def _selects(turn: Mapping) -> bool:
    """Whether only some of the solutions of a generator's turn were judged or trained on."""
    return "generator/batches_sampled" in turn or any(
        name == "generator/judged_share" or name.startswith("verifier/judged_") for name in turn)


def sources_of(workdir: Path) -> Sources:
    summary = json.loads((workdir / "summary.json").read_text(encoding="utf-8"))
    stored = read_provenance(workdir)
    arm = stored.get("arm")
    source = "+".join(dict.fromkeys(attempt.get("source", "") for attempt in stored.get("attempts", ())))
    return Sources(summary.get("provenance", {}).get("start", {}), method_digests(stored), weights_digest(stored),
                   source, json.dumps(arm) if arm and arm["name"] not in ARMS else "")


def own_arms(rows: Iterable[Evaluation]) -> dict[str, Arm]:
    """{name: record} of the arms that are not built in. Raises ValueError for a damaged record."""
    return {name: read_arm(record) for name, record in stored_arms(rows).items()}


def stored_arms(rows: Iterable[Evaluation]) -> dict[str, dict[str, Any]]:
    """`own_arms` as their runs stored them."""
    stored = {row.arm: row.arm_record for row in rows if row.arm_record}
    return {name: _stored_arm(name, text) for name, text in stored.items()}


def _stored_arm(name: str, text: str) -> dict[str, Any]:
    try:
        record = json.loads(text)
        read_arm(record)
        return record
    except ValueError as error:
        raise ValueError(f"arm_record of arm {name} in the table cannot be read ({error}): empty it, and the arm is "
                         "compared as one that trains the generator") from error


def setup_of(config: ConfigDict, files: Mapping[str, str] = {}) -> str:
    """A digest of what decides problems, prompts, models, stage 1 and the size of a turn, but start, seed and arm. A
    verifier counts in all arms: those that train without it evaluate it."""
    return _digest_of_settings(config, files, is_setup=True)


def method_of(config: ConfigDict, files: Mapping[str, str] = {}) -> str:
    """A digest of all other settings and functions that results depend on; after a slash, verifier.adapter; after a
    plus, a digest of the arm's files."""
    arm = sorted((key, digest) for key, digest in files.items() if is_of_arm(key))
    others = {key: digest for key, digest in files.items() if not is_of_arm(key)}
    shared = f"/{short_adapter(config.verifier.adapter)}" if config.verifier.adapter else ""
    return _digest_of_settings(config, others, is_setup=False) + shared + (f"+{_digest(arm)}" if arm else "")


def beside_the_arm(row: Evaluation) -> dict[str, str]:
    """The method's settings, and whether both roles are one policy, where the arm leaves that open."""
    settings, shared, _ = _parts_of_method(row)
    return {"method": settings} | ({} if _is_one_policy(row) or not settings else {"policies": shared or "two"})


def digests_of(row: Evaluation) -> dict[str, str]:
    """The recorded digests in which runs of one start and seed must agree, whatever their arms."""
    found = {name: getattr(row, name) for name in _DIGESTS if name != "weights"}
    found |= beside_the_arm(row) | _weights_of(row)
    if not _uses_verifier(row):
        found |= {"verifier_start": "", "verifier_weights": ""}
    return {name: digest for name, digest in found.items() if digest}


def _arm_of(row: Evaluation) -> Arm | None:
    return record_of(row.arm) or own_arms([row]).get(row.arm)


def _weights_of(row: Evaluation) -> dict[str, str]:
    """By role; one policy has the generator's alone. And of both, which is all that earlier tables hold."""
    generator, verifier, both = row.weights.split("/") if "/" in row.weights else ("", "", row.weights)
    if not generator and not verifier:
        return {"weights": both}
    is_one = _is_one_policy(row) or _parts_of_method(row)[1] == "generator"
    return {"weights": both, "generator_weights": generator} | ({} if is_one else {"verifier_weights": verifier})


def _uses_verifier(row: Evaluation) -> bool:
    return (arm := _arm_of(row)) is None or arm.uses_verifier


def _is_one_policy(row: Evaluation) -> bool:
    """By its arm, which leaves verifier.adapter nothing to decide."""
    return bool((arm := _arm_of(row)) and arm.is_one_policy)


def _parts_of_method(row: Evaluation) -> tuple[str, str, str]:
    """Digest of the settings, verifier.adapter and digest of the arm's files; earlier tables hold whole paths."""
    method, _, files = row.method.partition("+")
    settings, _, adapter = method.partition("/")
    return settings, "" if _is_one_policy(row) else short_adapter(adapter), files


def short_adapter(adapter: str) -> str:
    """A folder by its name, as other paths are; `./` tells a folder named generator from the word."""
    return adapter if adapter in ("", "generator") else f"./{without_folder(adapter)}"


def _digest_of_settings(config: ConfigDict, files: Mapping[str, str], is_setup: bool) -> str:
    """Settings that are not defaults: a key that is added later changes nothing."""
    defaults, settings = flatten(default_config()), flatten(config)
    # A metric is no path.
    changed = {key: value if key in ENDING else without_folder(value) for key, value in settings.items()
               if (key.startswith(_SETUP) and key not in ENDING) == is_setup and changes_results(key, settings)
               and key not in _COLUMNS and value != defaults.get(key) and _is_used(config, key)}
    functions = {f"file of {key}": digest for key, digest in files.items() if key.startswith(_SETUP) == is_setup}
    return _digest(sorted((changed | functions).items()))


def _is_used(config: ConfigDict, key: str) -> bool:
    """A model's sizes do not count where it has a checkpoint, nor settings of adapters without a rank."""
    role, _, field = key.partition(".model.")
    if field.startswith("lora."):
        return config[role].model.lora.rank > 0
    return not field or field in NUMERICS or not config[role].checkpoint


def _digest(facts: Any) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


def _turn_beside(metrics: Sequence[Mapping], index: int) -> Mapping:
    """The generator's turn after the evaluation at this index, or else the one before."""
    later = (row for row in metrics[index:] if row["phase"] == "generator")
    earlier = (row for row in reversed(metrics[:index]) if row["phase"] == "generator")
    return next(later, None) or next(earlier, {})


def write_table(rows: Iterable[Evaluation], path: str | os.PathLike) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Evaluation._fields)
    writer.writerows([_cell(value) for value in row] for row in rows)
    write_atomically(path, text.getvalue())


def _cell(value: Any) -> Any:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else value


def read_tables(paths: Sequence[str | os.PathLike], name: str = "--figures") -> list[Evaluation]:
    """The rows of tables. Raises ValueError for a damaged table, a repeated evaluation, or runs that do not compare."""
    rows, places, first = [], {}, {}
    for path in paths:
        found = _read_table(local_path(name, path))
        if not found:
            raise ValueError(f"{path} has no rows: name the ablation.csv of an experiment with a finished run")
        for line, row in found:
            key = (*run_of(row), row.turn)
            place = f"{path}, line {line}"
            if key in places:
                raise ValueError(f"{place} is the same evaluation as {places[key]} (setting {row.setting!r}, start "
                                 f"{row.start}, arm {row.arm}, seed {row.seed}, turn {row.turn}): leave one out")
            places[key] = place
            for facts, digest, difference in _must_be_alike(row):
                other, its_place = first.setdefault(facts, (digest, place)) if digest else ("", "")
                if other != digest:
                    raise ValueError(f"{place} and {its_place} are both of task {row.task} and setting "
                                     f"{row.setting!r}, but the runs {difference}: draw them apart, or remove the "
                                     "table, which the experiment's command writes anew")
            rows.append(row)
    return rows


def rows_of_others(path: Path, runs: Collection[tuple]) -> list[Evaluation]:
    """A table's rows that belong to none of `runs` (as `run_of` names them); none without a table. Raises ValueError
    for a damaged table."""
    return [row for _, row in _read_table(path) if run_of(row) not in runs] if path.exists() else []


def run_of(row: Evaluation) -> tuple:
    return row.task, row.setting, row.start, row.arm, row.seed


def _must_be_alike(row: Evaluation) -> list[tuple[tuple, Any, str]]:
    """For each digest or arm of a row: which runs must have the same, its value, and how they differ otherwise."""
    side_by_side, pair = (row.task, row.setting), (row.task, row.setting, row.start, row.seed)
    found = [
        (("setup", *side_by_side), row.setup, f"had {SETUP_IN_WORDS}"),
        (("method", *side_by_side, row.arm), row.method and "+".join(_parts_of_method(row)),
         f"of arm {row.arm} differ in more than the seed, such as a schedule, a "
         "reward, a loss, a learning rate or the version of your function"),
        # Read: what the task's stage 1 teaches is no part of an arm, and earlier versions stored other fields.
        (("record", row.arm), own_arms([row]).get(row.arm, ""), f"are of two different arms named {row.arm}"),
        (("problems", *side_by_side, row.start), row.problems, "had other problems or prompts: "
         f"{OTHER_PROBLEMS}"),
        (("generator_start", *pair), row.generator_start, f"of start {row.start} and seed {row.seed} began with "
         "different weights of the generator, and are no pair"),
    ]
    weights = _weights_of(row)
    for name, digest in weights.items():
        if name == "weights" and len(weights) > 1:
            continue
        role = name.removesuffix("weights").rstrip("_")
        alone = row.arm if role == "verifier" and not _uses_verifier(row) else ""
        whose = role and f" of the {role}"
        found.append(((name, *side_by_side, alone), digest, f"started from different weights{whose}: the checkpoints "
                      "or adapters that they name have different contents"))
    if _uses_verifier(row):
        found.append((("verifier_start", *pair), row.verifier_start, f"of start {row.start} and seed {row.seed} began "
                      "with different weights of the verifier, and are no pair"))
    return found


def _read_table(path: Path) -> list[tuple[int, Evaluation]]:
    try:
        text = path.read_text(encoding="utf-8-sig")  # spreadsheets begin a file with a byte-order mark
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ValueError(f"{path} cannot be read ({reason}): name the CSV file of an experiment") from error
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        columns, found = reader.fieldnames or [], [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num + 1} cannot be read ({error}): name the ablation.csv of an "
                         "experiment") from error
    if missing := [name for name in Evaluation._fields if name not in columns and name not in _OPTIONAL]:
        raise ValueError(f"{path} lacks the columns {', '.join(missing)}: name the ablation.csv of an experiment")
    return [(line, Evaluation(*(_value(name, row.get(name) or "", f"{path}, line {line}")
                                for name in Evaluation._fields))) for line, row in found]


def _value(name: str, text: str, place: str) -> Any:
    if name in _TEXTS:
        return task_name(text) if name == "task" else text  # earlier tables hold whole paths
    if not text and name in _MAY_BE_EMPTY:
        return None
    try:
        return int(text) if name in _COUNTS else float(text)
    except ValueError as error:
        raise ValueError(f"{place}: {name}={on_one_line(shortened(text))} is no "
                         f"{'whole number' if name in _COUNTS else 'number'}: correct it") from error
