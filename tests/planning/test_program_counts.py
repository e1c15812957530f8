"""How many programs each shipped config compiles before its first turn: minutes of compiling for a large model."""

from collections import Counter

import jax
import pytest

from tango_jax.cli.command_line import load_config
from tango_jax.cli.config_file import shipped_configs
from tango_jax.config import ROLES
from tango_jax.loop.compilation import _batches, _compile_update
from tango_jax.method.rehearsal import Trained
from tango_jax.planning.job import make_job
from tango_jax.planning.program_counts import compile_seconds, role_programs, sampler_programs
from tango_jax.planning.targets import Devices
from tango_jax.rl.policy import sampler_sizes
from tango_jax.runtime.ahead import program_key

MOST = 40  # of a role, all kinds together
NAMES = [name for name in shipped_configs() if name != "own_problems"]  # it needs arguments


class Counted:
    """In the place of a `CompileAhead`: counts, and compiles nothing."""

    def __init__(self):
        self.seen = {}

    def __call__(self, fn, is_local=False):
        def count(*args):
            return self.seen.setdefault((id(fn), program_key(args)), fn.eval_shape(*args))

        return count


@pytest.mark.parametrize("name", NAMES)
def test_a_role_compiles_few_programs(name):
    config = load_config(name)
    for role in ROLES:
        sizes = sampler_sizes(config[role])
        found = sampler_programs(sizes, {1, config.rl.samples_per_prompt, config.rl.verifications_per_solution})
        # An update and a score for each width of prompts; the layout of decoding weights; an update and a loss of
        # stage 1.
        others = 2 * len(sizes.prompt_buckets) + 1 + 2 * bool(config[role].sft.steps)
        assert found.total() + others <= MOST, (role, found, others)


@pytest.mark.parametrize("settings", [
    (), ("generator.row_buckets=(2,4,8)", "generator.prompt_buckets=(40,)"),
    ("generator.row_buckets=(4,8)", "generator.cache_buckets=(8,16)", "generator.cache_tokens=1088"),
])
def test_the_count_is_that_of_the_sampler(settings):
    config = load_config("tiny", [*settings, "generator.model.num_layers=1"])
    job = make_job(config, Devices(jax.devices()[:1], True, {}), 1)
    policy, counted = job.functions["generator"], Counted()
    sizes = {1, *job.method.samples_of("generator")}
    policy.sampler.driver.compile_ahead(counted, job.policies["generator"].sampling.weights, sizes)
    assert len(counted.seen) == sampler_programs(sampler_sizes(config.generator), sizes).total()


TWICE = ("verifier.prompt_buckets=(40,)", "verifier.prompts_per_micro_batch=1")


@pytest.mark.parametrize("arm, settings, scores", [
    ("tango", (), 1), ("tango", TWICE, 2),
    ("tango", ("verifier.loss.kl_coef=0",), 0),  # nothing is scored
    ("tango", ("verifier.loss.kl_coef=0", "verifier.loss.minibatches=2"), 1),
    ("tango", ("verifier.loss.epochs=2",), 1),  # by the reference and by the policy
    ("taught_verifier", TWICE, 2),  # and by the teacher
    ("scored", ("verifier.loss.kl_coef=0", "eval.problems=16"), 1),  # marks are read
    ("scored", ("eval.problems=16",), 2),
])
def test_the_count_is_that_of_updates_and_scores(arm, settings, scores):
    config = load_config("tiny", [f"arm={arm}", "eval.pool=8", "eval.problems=8",
                                  *(f"{role}.model.num_layers=1" for role in ROLES), *settings])
    job, counted = make_job(config, Devices(jax.devices()[:1], True, {}), 1), Counted()
    policy, found = job.functions["verifier"], role_programs(job, "verifier")
    for bucket in (*policy.config.prompt_buckets, policy.config.max_prompt):
        _compile_update(counted, policy, bucket, job.method.rehearsals["verifier"])
    read = Trained(job.method.most_read(config), 1, is_scored=True)
    for batch in _batches(policy, 1, read) if arm == "scored" else ():
        counted(policy.score)(policy.abstract_weights(), batch)
    made = Counter(fn for fn, _ in counted.seen)
    assert found["score"] == made[id(policy.score)] == scores
    assert found["update"] == made[id(policy.update)] == (2 if settings == TWICE else 1)


def test_the_time_to_compile_by_hand():
    """Two inserts as long as a prefill, ten decodes, three updates; on eight cores."""
    counts = {"generator": Counter(insert=2, decode=10, resize=9, update=3), "verifier": Counter(decode=1)}
    seconds = {"generator/prefill": 5.0, "generator/decode": 12.0, "generator/update": 40.0, "verifier/decode": 2.0}
    local, shared = (2 * 5.0 + 10 * 12.0 + 2.0) / 8, 3 * 40.0
    assert compile_seconds(counts, seconds, processes=1) == pytest.approx(local + shared / 8)
    assert compile_seconds(counts, seconds, processes=4) == pytest.approx(shared)  # in one order, beside the others
