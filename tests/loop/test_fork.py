"""A run that begins with the newest policies of another: `python -m tango_jax.train --from=RUN`."""

import dataclasses
import itertools
import json
import re
import shutil

import jax
import numpy as np
import pytest

from support.paths import CONFIGS
from support.policies import policies_of
from support.tiny_checkpoints import save_run, write_tiny_folder
from support.tiny_train import StopAtRow, repeatable_rows
from tango_jax.cli.command_line import load_config, parse_command_line
from tango_jax.config import ROLES
from tango_jax.export import export
from tango_jax.loop import run
from tango_jax.loop.fork import check_fork, read_fork
from tango_jax.loop.resume import abstract_states, check_start, peek, save, start_or_resume
from tango_jax.method.trust import Evidence
from tango_jax.records import Memory
from tango_jax.runtime import hosts
from tango_jax.runtime.checkpoint import Checkpointer, CheckpointError, read_state
from tango_jax.runtime.console import Console
from tango_jax.runtime.sealed import MANIFEST, sampled_digest
from tango_jax.runtime.trees import tree_fingerprint
from tango_jax.tracking.evaluations import Sources, evaluations_of
from tango_jax.tracking.learning_curve import Curve, differing
from tango_jax.tracking.provenance import begin, read_provenance
from tango_jax.tracking.rollout_dump import read_rollouts
from tango_jax.tracking.run_config import save_config

SILENT = Console(enabled=False)
SAME = {"is_task": True, "is_arm": True, "is_judge": True, "is_batch": True}  # of the run that is forked
SETTINGS = [f"{role}.{setting}" for role in ROLES for setting in (
    "mesh.fsdp=1", "row_buckets=(8,)", "cache_buckets=()", "max_response=48", "model.num_layers=1", "sft.steps=2")]
SETTINGS += ["eval.pool=2", "eval.problems=2", "rollouts.every=1", "rl.warmup_steps=1", "rl.generator_steps=2"]


@pytest.fixture(scope="module")
def config():
    return load_config(str(CONFIGS / "tiny.py"), SETTINGS)


@pytest.fixture(scope="module")
def policies(config):
    return policies_of(config)


@pytest.fixture(scope="module")
def source(config, policies, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("source") / "run"
    run.run_or_resume(config, workdir, SILENT, policies)
    return workdir


def forked(source, workdir, *overrides: str):
    config, _ = parse_command_line("train", "doc", [f"--from={source}", f"--workdir={workdir}",
                                                    *(f"--config.{item}" for item in overrides)], "runs/NAME")
    return config


def starts_of(workdir) -> dict[str, str]:
    return json.loads((workdir / "summary.json").read_text())["provenance"]["start"]


def saved(workdir, policies, step=None):
    return read_state(workdir / "checkpoints", abstract_states(policies), only=step)


@pytest.mark.long
def test_a_fork_goes_on_with_the_weights_moments_and_problems(source, policies, tmp_path):
    settings = ("rl.generator_steps=1", "generator.optimizer.lr=3e-3", "checkpoint.keep=9")
    config = forked(source, tmp_path / "fork", *settings)
    assert (config.rl.warmup_steps, config.generator.optimizer.lr) == (0, 3e-3)
    run.run_or_resume(config, tmp_path / "fork", SILENT, policies)
    theirs, begun, ended = (saved(workdir, policies, step) for workdir, step in (
        (source, None), (tmp_path / "fork", 0), (tmp_path / "fork", 1)))
    assert (theirs.step, begun.step, ended.step) == (3, 0, 1)
    for ours, other in zip(jax.tree.leaves(begun.state), jax.tree.leaves(theirs.state), strict=True):
        assert np.array_equal(ours, other)
    assert int(ended.state["generator"].step) == int(theirs.state["generator"].step) + 1

    # The problems after those of the source, as its next turn would have had them.
    assert begun.meta["cursors"] == theirs.meta["cursors"]
    _, task = run.rehearsed(config, policies)
    taken = theirs.meta["cursors"]["train"]
    expected = {task.train_problem(taken + number).question for number in range(config.rl.prompts_per_step)}
    rows = [row for row in read_rollouts(tmp_path / "fork/rollouts") if row["role"] == "generator"]
    assert {row["problem"]["question"] for row in rows if row["phase"] != "eval"} == expected

    (tmp_path / "fork/checkpoints/1").rename(tmp_path / "later")
    card = (export(tmp_path / "fork", "generator", tmp_path / "out") / "README.md").read_text()
    assert re.search("^# Generator of a run of .*, after reinforcement learning$", card, re.MULTILINE)

    digest = sampled_digest([source / f"checkpoints/3/{MANIFEST}"])
    stored = read_provenance(tmp_path / "fork")
    assert stored["fork"] == {"run": str(source), "turn": 3, "digest": digest} | SAME
    start, before = starts_of(tmp_path / "fork"), starts_of(source)
    assert [start[role] for role in ROLES] == [tree_fingerprint(theirs.state[role].params) for role in ROLES]
    assert all(start[f"{role}_reference"] == before[role] != start[role] for role in ROLES)

    # Interrupted, it goes on without the checkpoints of the other run.
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    again = forked(copy, tmp_path / "again", *settings)
    with pytest.raises(hosts.Preempted):
        run.run_or_resume(again, tmp_path / "again", SILENT, policies, StopAtRow(tmp_path / "again", 1))
    for checkpoints in (tmp_path / "again/checkpoints/1", copy / "checkpoints"):
        shutil.rmtree(checkpoints)
    run.run_or_resume(again, tmp_path / "again", SILENT, policies)
    assert repeatable_rows(tmp_path / "again/metrics.jsonl") == repeatable_rows(tmp_path / "fork/metrics.jsonl")
    assert read_provenance(tmp_path / "again")["fork"]["digest"] == digest
    assert starts_of(tmp_path / "again") == start


def test_a_fork_begins_with_other_weights_than_its_stage_one(config, policies, tmp_path):
    """In comparisons, it is no pair of a run that begins with that stage 1, or of a fork of another run."""
    stage_one = {role: policies[role].init(np.zeros(2, np.uint32)).params for role in ROLES}
    loaded = {role: tree_fingerprint(params) for role, params in stage_one.items()} | {"problems": "", "templates": "t"}
    starts = {"": start_or_resume(policies, dict(stage_one), None, loaded, Checkpointer(tmp_path / "none"), config)}
    for name, factor in (("a", 2.0), ("b", 3.0)):
        moved = {role: state.replace(params=jax.tree.map(lambda leaf, by=factor: by * leaf, state.params))
                 for role, state in starts[""].states.items()}
        with Checkpointer(tmp_path / name / "checkpoints") as checkpointer:
            save(checkpointer, dataclasses.replace(starts[""], states=moved, memory=Memory(turn=4)), policies)
        fork = config.copy_and_resolve_references()
        fork.fork_of = str(tmp_path / name)
        with Checkpointer(tmp_path / f"fork_of_{name}") as checkpointer:
            facts = SAME | {"turn": 4}
            starts[name] = start_or_resume(policies, dict(stage_one), None, loaded, checkpointer, fork, facts)
            save(checkpointer, starts[name], policies)
        resumed = peek(Checkpointer(tmp_path / f"fork_of_{name}"), policies)
        check_start(resumed, loaded, fork)
        with pytest.raises(ValueError, match="the stage 1 of the verifier has changed since the checkpoint of turn 0"):
            check_start(resumed, loaded | {"verifier": "x"}, fork)
        again = start_or_resume(policies, dict(stage_one), resumed, loaded, Checkpointer(tmp_path / f"fork_of_{name}"),
                                fork, facts)
        assert again.fingerprints == starts[name].fingerprints

    row = {"step": 0, "phase": "eval", "generator_step": 0, "generator/accuracy": 0.5}
    curves = [Curve(tuple(evaluations_of([row], config, "", Sources(start.fingerprints)))) for start in starts.values()]
    for one, other in itertools.combinations(curves, 2):
        assert differing(one, other) == {"generator_start", "verifier_start"}
    assert curves[0].evaluations[0].generator_start == loaded["generator"][:12]  # of a run that is no fork: as ever


@pytest.mark.long
def test_adapters_of_one_policy_go_on_upon_their_base(tmp_path):
    model = write_tiny_folder(tmp_path / "model")
    own = (f"checkpoint={model}", "model.lora.rank=4", "max_prompt=200", "max_response=40")
    config = load_config(str(CONFIGS / "tiny.py"), [
        *SETTINGS, "verifier.adapter=generator", *(f"{role}.{setting}" for role in ROLES for setting in own)])
    policies = policies_of(config)
    run.run_or_resume(config, tmp_path / "run", SILENT, policies)
    fork = forked(tmp_path / "run", tmp_path / "fork", "rl.generator_steps=1", "checkpoint.keep=9")
    run.run_or_resume(fork, tmp_path / "fork", SILENT, policies)
    theirs, begun = saved(tmp_path / "run", policies), saved(tmp_path / "fork", policies, 0)
    assert list(begun.state) == ["generator"]
    for ours, other in zip(jax.tree.leaves(begun.state), jax.tree.leaves(theirs.state), strict=True):
        assert np.array_equal(ours, other)
    with pytest.raises(ValueError, match=r"its adapters were trained on other weights .* \(generator_base\): name"):
        read_fork(fork, SAME | {"turn": theirs.step}, abstract_states(policies), {"generator_base": "another"})


def test_statistics_of_other_problems_or_another_arm_stay_behind(config, policies, tmp_path):
    """A synthetic task has no file: its settings say which problems it makes. Arms of one name may be two by a file."""
    arms = {name: tmp_path / name / "own.py" for name in "ab"}
    for name, path in arms.items():
        path.parent.mkdir()
        path.write_text(f"from tango_jax.method.arms import ARMS\nmine = ARMS['tango']  # {name}\n")
    template = tmp_path / "judge.txt"
    template.write_text("{problem} {solution} {num_steps}")
    own = [*SETTINGS, f"arm={arms['a']}:mine", f"verifier.template={template}"]
    config = load_config(str(CONFIGS / "tiny.py"), own)
    begin(config, tmp_path / "run", SILENT).keep(tmp_path / "run")
    save_config(config, tmp_path / "run/config.json")
    stage_one = {role: policies[role].init(np.zeros(2, np.uint32)).params for role in ROLES}
    memory = Memory(4, {"train": 8}, (1.0, 2.0), (3.0,) * len(Evidence()), {"4": (1.0, 2.0)}, {"mine": 5.0})
    now = dict.fromkeys((*ROLES, "problems", "templates"), "")
    with Checkpointer(tmp_path / "run/checkpoints") as checkpointer:
        start = start_or_resume(policies, stage_one, None, now, checkpointer, config)
        save(checkpointer, dataclasses.replace(start, memory=memory), policies)

    def kept(*overrides: str, problems: str = "") -> Memory:
        fork = load_config(str(CONFIGS / "tiny.py"), [*own, *overrides])
        fork.fork_of = str(tmp_path / "run")
        facts = begin(fork, tmp_path / "fork", SILENT).fork
        return Memory.restored(read_fork(fork, facts, abstract_states(policies), now | {"problems": problems}).meta)

    place = Memory(cursors=memory.cursors)
    assert kept() == kept("generator.optimizer.lr=1e-5", "seed=3") == memory.replace(turn=0)
    unmeasured = memory.replace(turn=0, evidence=())
    assert kept("verifier.template=plain") == kept("verifier.temperature=0.5") == unmeasured
    assert kept("verifier.template=math_first_error", "verifier.stop_at_first_error=true") == unmeasured
    # The same marks are written, whatever they are rewarded by.
    assert kept("rl.step_reward=probability") == kept("generator.temperature=0.5") == memory.replace(turn=0)
    # Averages of counts in turns of another size would last longer, or shorter.
    assert kept("rl.prompts_per_step=16") == memory.replace(turn=0, label_counts=(0.0, 0.0))
    assert kept("arm=grpo") == kept(f"arm={arms['b']}:mine") == place
    assert kept(problems="others") == kept("task.rl_words=(3,3)") == kept("task.data_seed=9") == Memory()
    template.write_text("Be strict. {problem} {solution} {num_steps}")
    assert kept() == unmeasured


def test_a_kl_term_refers_to_what_it_did(config, policies, tmp_path):
    """Also in the fork of a fork. Fresh adapters change nothing of their base, whatever the seed."""
    stage_one = {role: policies[role].init(np.zeros(2, np.uint32)).params for role in ROLES}
    digests = dict.fromkeys((*ROLES, "problems", "templates"), "")
    with Checkpointer(tmp_path / "run/checkpoints") as checkpointer:
        start = start_or_resume(policies, stage_one, None, digests, checkpointer, config)
        theirs = digests | {"verifier_reference": "first"}
        save(checkpointer, dataclasses.replace(start, memory=Memory(turn=4), fingerprints=theirs), policies)

    def read(now: dict[str, str], *overrides: str):
        fork = load_config(str(CONFIGS / "tiny.py"), [*SETTINGS, *overrides])
        fork.fork_of = str(tmp_path / "run")
        return read_fork(fork, SAME | {"turn": 4}, abstract_states(policies), digests | now)

    kl = [f"{role}.loss.kl_coef=0.1" for role in ROLES]
    assert read({"verifier": "first"}, *kl).step == 0
    with pytest.raises(ValueError, match=r"the KL term of the verifier would .* or set verifier.loss.kl_coef=0"):
        read({}, *kl)
    with pytest.raises(ValueError, match="the KL term of the generator and of the verifier would refer to"):
        read({"generator": "another"}, *kl)
    none = [f"{role}.loss.kl_coef=0" for role in ROLES]
    assert read({"generator": "another"}, *none).step == 0
    fresh = {"generator": "seed 1", "generator_base": "", "verifier": "first"}
    assert read(fresh, *kl, "generator.sft.steps=0").step == 0
    # A role that is not trained has no KL term. Drawn with another seed it is kept as it was there.
    untrained = {"generator": "", "verifier": "seed 2"}
    assert read(untrained, *kl, "arm=grpo", "verifier.sft.steps=0").step == 0
    with pytest.raises(ValueError, match="the KL term of the generator would refer to"):
        read(untrained | {"generator": "another"}, *kl, "arm=grpo", "verifier.sft.steps=0")
    # Other weights that the settings name would not be used.
    with pytest.raises(ValueError, match=r"keeps .* the verifier, which arm=fixed_verifier does not train, would .* "
                       r"keep that run's verifier\.checkpoint and verifier\.init_from, or begin a new run "):
        read(untrained, *kl, "arm=fixed_verifier", "verifier.checkpoint=another_prm", "verifier.sft.steps=0")


@pytest.mark.parametrize("overrides, message", [
    (["generator.model.num_layers=2"], r"the generator is another model than .* \(num_layers 1 there, 2 here\)"),
    (["verifier.model.num_heads=4", "verifier.model.num_kv_heads=4"],
     r"the verifier is another model than .* \(num_heads \d there, 4 here; "),
    (["verifier.adapter=generator"], r"that run has two policies, and this one would have one policy for both roles"),
])
def test_a_fork_of_other_policies_is_refused(config, tmp_path, overrides, message):
    save_run(tmp_path / "run", config, step=3)  # nothing is read but its settings
    changed = load_config(str(CONFIGS / "tiny.py"), [*SETTINGS, *overrides])
    changed.fork_of = str(tmp_path / "run")
    policies = policies_of(changed)
    with pytest.raises(ValueError, match=rf"^fork_of={re.escape(str(tmp_path / 'run'))}: {message}.*$") as error:
        check_fork(changed, policies, abstract_states(policies))
    assert "\n" not in str(error.value)


def test_arrays_that_differ_are_named(config, policies, tmp_path):
    save_run(tmp_path / "run", config)
    config = config.copy_and_resolve_references()
    config.fork_of = str(tmp_path / "run")
    message = r"is a checkpoint of another model or optimizer: .* generator/opt_state/\S+: checkpoint has none"
    with pytest.raises(CheckpointError, match=message):
        check_fork(config, policies, abstract_states(policies))
    shutil.rmtree(tmp_path / "run/checkpoints")
    with pytest.raises(ValueError, match=r"there is no checkpoint of stage 2 in .*: name the workdir of a run"):
        check_fork(config, policies, abstract_states(policies))


def test_the_command_takes_the_settings_of_the_run(config, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    save_config(config, tmp_path / "run/config.json")
    made = forked(tmp_path / "run", tmp_path / "new", "seed=7", "rl.warmup_steps=2")
    assert (made.seed, made.rl.warmup_steps, made.rl.generator_steps) == (7, 2, 2)
    assert made.fork_of == made.generator.init_from == made.verifier.init_from == str(tmp_path / "run")
    left_alone = config.copy_and_resolve_references()
    left_alone.arm = "fixed_verifier_warm"  # whose verifier has had its turns
    (tmp_path / "alone").mkdir()
    save_config(left_alone, tmp_path / "alone/config.json")
    assert forked(tmp_path / "alone", tmp_path / "new").rl.warmup_steps == 0
    for arguments, message in (
        ([f"--from={tmp_path / 'run'}", f"--workdir={tmp_path / 'run'}"], "is the run that --from names: a"),
        ([f"--from={tmp_path / 'none'}"], "is not the folder of a run: "),
        ([], "no --config is given"),
    ):
        with pytest.raises(SystemExit) as stopped:
            parse_command_line("train", "doc", arguments, "runs/NAME")
        assert message in str(stopped.value) and "\n" not in str(stopped.value)
