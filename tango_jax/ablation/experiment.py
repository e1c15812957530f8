"""A whole experiment: makes the missing runs of a plan, and writes its table."""

import hashlib
import json
from typing import NamedTuple

import jax
from ml_collections import ConfigDict

from tango_jax.ablation.planned_runs import Plan, StageOne, check_pairs, check_plan, stage_ones_of
from tango_jax.ablation.workers import Job, run_jobs
from tango_jax.config import ROLES, flatten
from tango_jax.loop.run import rehearsed, run_or_resume
from tango_jax.loop.stage_one import run_stage_one
from tango_jax.method.arms import ARMS
from tango_jax.method.own_arm import arm_name, shares_policy
from tango_jax.rl.policy import Policy, make_policies
from tango_jax.runtime import hosts
from tango_jax.runtime.checks import require
from tango_jax.runtime.console import Console
from tango_jax.tasks.registry import tokenizer_model
from tango_jax.tracking.evaluations import (
    Evaluation,
    evaluations_of,
    rows_of_others,
    sources_of,
    stored_arms,
    task_name,
    write_table,
)
from tango_jax.tracking.metrics import read_metrics
from tango_jax.tracking.provenance import begin
from tango_jax.tracking.run_config import save_config

TABLE = "ablation.csv"


class Outcome(NamedTuple):
    rows: list[Evaluation]  # of the table; only in the first process
    failed: dict[str, str]  # name of a run -> the last line of its log


def run_experiment(plan: Plan, console: Console) -> Outcome:
    """Make what is missing of a plan, and write the table after every run. Raises ValueError for a workdir with other
    settings and for impossible workers, and Preempted on SIGTERM."""
    workers = plan.config.ablation.workers
    check_plan(plan)
    hosts.in_first(lambda: _check_other_parts(plan))
    if workers == 1:
        _run_in_process(plan, console)
        return Outcome(write_results_table(plan) if hosts.is_first() else [], {})
    require(hosts.is_alone(), f"ablation.workers={workers} needs a job of one process; this one has "
            f"{jax.process_count()}: set it to 1")
    require(jax.default_backend() == "cpu", f"ablation.workers={workers}: several runs cannot share the "
            f"{jax.default_backend()} of this machine; set it to 1, or JAX_PLATFORMS=cpu")
    failed = _run_in_workers(plan, console)
    return Outcome(write_results_table(plan), failed)


def write_results_table(plan: Plan) -> list[Evaluation]:
    """The plan's finished runs, and those that the table has of other plans: parts of an experiment share a folder."""
    rows = _rows_of_other_parts(plan)
    for run in plan.runs:
        if run.is_finished():
            metrics = read_metrics(run.folder / "metrics.jsonl")
            rows += evaluations_of(metrics, run.config, run.cell.setting, sources_of(run.folder))
    write_table(rows, plan.workdir / TABLE)
    return rows


def _rows_of_other_parts(plan: Plan) -> list[Evaluation]:
    planned = {(task_name(run.config.task.name), run.cell.setting, run.config.task.data_seed, run.arm, run.seed)
               for run in plan.runs}
    return rows_of_others(plan.workdir / TABLE, planned)


def _check_other_parts(plan: Plan) -> None:
    """Before runs are made. Raises ValueError for a damaged table and arms that are no pairs with those it has."""
    rows = _rows_of_other_parts(plan)
    for cell in plan.cells:
        asked = tuple(cell.config.ablation.arms) or (cell.config.arm,)
        beside = [row for row in rows if row.arm not in map(arm_name, asked)
                  and (row.task, row.setting) == (task_name(cell.config.task.name), cell.setting)]
        built_in = [row.arm for row in beside if row.arm in ARMS]
        records = {f"FILE.py:{name}": record for name, record in stored_arms(beside).items()
                   if "further_prompts" in record}  # some tables lack them
        check_pairs(cell, tuple(dict.fromkeys([*built_in, *records, *asked])), records)


def _run_in_process(plan: Plan, console: Console) -> None:
    preemption, policies = hosts.Preemption(), _SharedPolicies()
    runs = plan.unfinished()
    for stage in stage_ones_of(runs):
        _run_stage_one(stage, policies, console, preemption)
        _keep_settings(plan)
    for run in runs:
        console.log(f"run {plan.runs.index(run) + 1} of {len(plan.runs)}: {run.name}")
        run_or_resume(run.config, run.folder, console, policies.of(run.config), preemption)
        _keep_settings(plan)
        hosts.in_first(lambda: write_results_table(plan))


def _run_stage_one(
    stage: StageOne, policies: "_SharedPolicies", console: Console, preemption: hosts.Preemption
) -> None:
    provenance = begin(stage.config, stage.folder, console)
    shared = policies.of(stage.config)
    _, task = rehearsed(stage.config, shared)
    run_stage_one(shared, stage.config, task, stage.folder, console, preemption, provenance)


def _run_in_workers(plan: Plan, console: Console) -> dict[str, str]:
    preemption, workers = hosts.Preemption(), plan.config.ablation.workers
    runs, stages = plan.unfinished(), {}
    for stage in stage_ones_of(runs):
        if stage.is_finished():
            continue
        if stage.folder == plan.workdir:  # this process has locked the folder, as the work itself would
            _run_stage_one(stage, _SharedPolicies(), console, preemption)
        else:
            stages[stage.folder] = Job(f"stage_one/{stage.folder.name}", "sft", stage.config, stage.folder)
    failed = run_jobs("Stage 1", list(stages.values()), workers, console, preemption)
    lost = {folder for folder, job in stages.items() if job.name in failed}
    is_lost = {run.name: run.stage_one is not None and run.stage_one.folder in lost for run in runs}
    jobs = [Job(run.name, "train", run.config, run.folder) for run in runs if not is_lost[run.name]]
    failed |= run_jobs("Runs", jobs, workers, console, preemption, lambda: write_results_table(plan))
    _keep_settings(plan)
    return failed | {name: "its stage 1 failed" for name in is_lost if is_lost[name]}


def _keep_settings(plan: Plan) -> None:
    save_config(plan.config, plan.workdir / "config.json", plan.may_change)


class _SharedPolicies:
    """The compiled policies of the last run, for a next run with the same roles."""

    def __init__(self):
        self._key, self._policies = "", {}

    def of(self, config: ConfigDict) -> dict[str, Policy]:
        if (key := _roles_key(config)) != self._key:
            self._key, self._policies = "", {}  # frees them before the next ones are made
            self._policies = make_policies(config, shares_policy(config))
            self._key = key
        return self._policies


def _roles_key(config: ConfigDict) -> str:
    """All that policies are made of: the settings of the roles without their start, and the tokenizer."""
    settings = flatten(config)
    roles = {key: value for key, value in settings.items()
             if key.split(".")[0] in ROLES and not key.endswith(".init_from")}
    tokenizer = hashlib.sha256(tokenizer_model(config)).hexdigest()
    return json.dumps([roles, tokenizer, shares_policy(config)], sort_keys=True, default=list)
