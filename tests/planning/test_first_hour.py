"""configs/smollm2_gpu.py by arithmetic: about an hour, and room, on each of the cards that its docstring names."""

from collections import Counter

import pytest

from tango_jax.cli.command_line import load_config
from tango_jax.config import ROLES
from tango_jax.method.own_arm import make_schedule
from tango_jax.plan import parse_options
from tango_jax.planning.costs import num_parameters
from tango_jax.planning.estimates import estimated_programs
from tango_jax.planning.job import sized_job
from tango_jax.planning.memory import phases
from tango_jax.planning.run_plan import times_of
from tango_jax.planning.targets import machine_of
from tango_jax.weights.presets import preset_model
from tango_jax.weights.source import fields_of

NAME = "smollm2_gpu"


@pytest.mark.parametrize("card, most_minutes", [("l4", 60), ("a10g", 60), ("rtx-4090", 30)])
def test_it_fits_and_takes_about_an_hour(card, most_minutes):
    config, (options, *_) = load_config(NAME), parse_options([f"--config={NAME}", f"--target={card}:1"])
    machine = machine_of(card, 1)
    models = {role: preset_model(config[role].checkpoint, **fields_of(config[role])) for role in ROLES}
    job = sized_job(config, models, machine)
    programs = estimated_programs(job, machine.platform)
    assert max(phase.peak for phase in phases(job, programs)) < 0.8 * machine.memory
    counts = Counter(turn.role for turn in make_schedule(config).turns())
    target = options.target.with_shares(options.target.reached.likely)
    minutes = times_of(options, job, programs, counts, target).run_seconds / 60
    assert most_minutes / 3 < minutes < most_minutes


def test_the_models_size():
    """As the checkpoint's page tells, which counts norms."""
    model = preset_model("HuggingFaceTB/SmolLM2-360M-Instruct")
    assert num_parameters(model) + (2 * model.num_layers + 1) * model.width == 361_821_120
