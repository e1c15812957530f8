"""`plan --search`: what is tried, what it is estimated to need, and what is found, on tiny models."""
import dataclasses
import io
import itertools
import json
import math

import jax
import pytest
from jax.sharding import AbstractMesh

from support.paths import ROOT
from tango_jax import plan
from tango_jax.cli.command_line import load_config
from tango_jax.cli.validation import validate
from tango_jax.config import ROLES, flatten
from tango_jax.models.transformer import ModelConfig
from tango_jax.planning import choices, estimates, search
from tango_jax.planning.costs import MicroBatchShape
from tango_jax.planning.estimates import ProgramEstimate, as_programs, estimates_of
from tango_jax.planning.hlo import wire_bytes_by_kind
from tango_jax.planning.job import make_job, resized, sized_job
from tango_jax.planning.machines import Machine
from tango_jax.planning.memory import phases
from tango_jax.planning.pricing import Pricing, applied, overrides
from tango_jax.planning.programs import Program
from tango_jax.planning.run_plan import PlanOptions
from tango_jax.planning.search import simplest_first
from tango_jax.planning.search_tables import search_as_json, show_search
from tango_jax.planning.targets import TARGETS, Devices
from tango_jax.planning.times import TimeModel, trained_seconds
from tango_jax.planning.traffic import axis_members, score_traffic, update_traffic
from tango_jax.planning.workload import DecodeSegment, SamplingWorkload, update_workload
from tango_jax.runtime.console import Console

A100 = TARGETS["a100-80gb"]
TINY = str(ROOT / "configs/tiny.py")
# Slow on purpose: few rows at a time.
SIZES = ("model.num_layers=1", "model.num_kv_heads=2", "row_buckets=(4,)", "cache_buckets=(16,)")
SMALL = ["rl.prompts_per_step=16", *(f"{role}.{item}" for role in ROLES for item in SIZES)]


def options_of(*settings: str, memory: float = A100.memory, devices: int = 4) -> PlanOptions:
    target = dataclasses.replace(A100, memory=memory, compilers=("a_package_that_is_not_there",))
    return PlanOptions(load_config(TINY, [*SMALL, *settings]), target, devices, devices, filled=0.5, is_json=True)


def devices_of(options: PlanOptions) -> Devices:
    return Devices(jax.devices()[: options.devices], False, {})


@pytest.fixture(scope="module")
def job():
    options = options_of()
    return make_job(options.config, devices_of(options), options.per_process)


@pytest.fixture(scope="module")
def pricing(job):
    options = options_of()
    return Pricing(options, job, is_target=False)


@pytest.fixture(scope="module")
def parts(pricing):
    return {(role, kind): pricing.parts(role, kind) for role in ROLES for kind in ("sampling", "training")}


@pytest.fixture(scope="module")
def found(pricing):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "MOST_COMPILED", 1)
        return search.search(pricing.options, Console(enabled=False))


def described(tree):
    return jax.tree.map(lambda leaf: (leaf.dtype, leaf.sharding.spec, leaf.sharding.shard_shape(leaf.shape)), tree)


@pytest.mark.parametrize("settings", [
    ("generator.mesh.fsdp=2", "generator.mesh.tensor=2", "generator.mesh.decode_tensor=2",
     "generator.row_buckets=(8,)"),
    ("verifier.mesh.data=-1", "verifier.mesh.fsdp=2", "verifier.cache_tokens=448", "verifier.row_buckets=(4,8,12)",
     "verifier.model.remat=dots", "verifier.rows_per_micro_batch=2", "verifier.mesh.offload=true"),
])  # fmt: skip
def test_a_resized_job_is_the_job_of_those_settings(job, settings):
    options = options_of(*settings)
    made = make_job(options.config, devices_of(options), options.per_process)
    sized = resized(job, options.config)
    for role in ROLES:
        one, other = sized.policies[role], made.policies[role]
        for name in ("state", "batch", "stage_one"):
            assert described(getattr(one, name)) == described(getattr(other, name))
        for name in ("weights", "states"):
            assert described(getattr(one.sampling, name)) == described(getattr(other.sampling, name))
        assert one.sampling.prefill[1].token_PX.shape == other.sampling.prefill[1].token_PX.shape
        assert one.model_config == other.model_config
        assert one.sampler_config == other.sampler_config == made.functions[role].sampler.config


@pytest.mark.parametrize("settings", [
    (), ("generator.mesh.fsdp=2", "generator.mesh.tensor=2", "verifier.cache_tokens=448"),
])  # fmt: skip
def test_devices_that_are_only_counted_give_the_same_sizes(settings):
    options = options_of(*settings)
    made = make_job(options.config, devices_of(options), options.per_process)
    models = {role: policy.model_config for role, policy in made.policies.items()}
    sized = sized_job(options.config, models, Machine("cpu", options.devices, 0))
    for role in ROLES:
        assert estimates_of(sized, role, "cpu") == estimates_of(made, role, "cpu")
        programs = as_programs(role, estimates_of(sized, role, "cpu"), {})
        assert phases(sized, programs) == phases(made, programs)


def test_a_mesh_that_does_not_fit_is_refused(job):
    options = options_of("generator.mesh.decode_tensor=4")
    with pytest.raises(ValueError, match="generator: mesh decode_tensor=4 does not divide the model's num_kv_heads=2"):
        resized(job, options.config)


def test_members_of_a_group():
    mesh = AbstractMesh((2, 2, 2), ("data", "fsdp", "tensor"))
    assert axis_members(mesh, "tensor") == (0, 1)
    assert axis_members(mesh, "fsdp") == (0, 2)
    assert axis_members(mesh, "data") == (0, 4)
    assert axis_members(mesh, "data", "fsdp") == (0, 2, 4, 6)


def test_traffic_of_scoring_by_hand():
    # As in test_collectives.test_bytes_by_hand: 160 numbers in a layer's matrices, 24 in table and head each.
    model = ModelConfig(
        vocab_size=6, width=4, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=2, mlp_width=8, tied_head=False,
        compute_dtype="bfloat16",
    )  # fmt: skip
    mesh = AbstractMesh((2, 2, 2), ("data", "fsdp", "tensor"))
    sent = wire_bytes_by_kind(score_traffic(model, mesh, MicroBatchShape(1, 10), 4), passes=1)
    # Layers once; two sums a layer of 10 tokens and one for the table; four numbers of each of 12 scored tokens.
    assert sent == {"all-gather": 0.5 * (80 * 2 + 12 * 2 + 12 * 4),
                    "all-reduce": 2 * 0.5 * ((2 * 10 + 10) * 4 * 2 + 12 * 4 * 4)}  # fmt: skip
    alone = AbstractMesh((1, 1, 1), ("data", "fsdp", "tensor"))
    assert score_traffic(model, alone, MicroBatchShape(1, 10), 4) == []
    assert update_traffic(model, alone, MicroBatchShape(1, 10), 4) == []


def test_an_estimate_is_corrected_by_a_compiled_program():
    estimate = ProgramEstimate(known=100, rough=50, output=10, argument=7)
    assert estimate.program() == Program(argument=7, output=10, alias=0, temp=150, collectives=[])
    compiled = Program(argument=7, output=30, alias=20, temp=200, collectives=[])
    assert estimate.factor(compiled) == 2  # 210 beside its arguments, of which 10 and 100 are known
    assert estimate.program(2).added == compiled.added
    assert estimate.factor(compiled._replace(temp=0)) == estimates.LEAST_FACTOR
    assert estimate.factor(compiled._replace(error="RESOURCE_EXHAUSTED")) is None


def test_estimates_of_compiled_programs(found):
    """What is called known is known; what is not is right to a factor of a few; traffic is what is sent."""
    for candidate in (found.given, *found.compiled):
        job, programs = candidate.plan.job, candidate.plan.programs
        for role in ROLES:
            predicted = estimates_of(job, role, "cpu")
            for name, estimate in predicted.items():
                program = programs[f"{role}/{name}"]
                print(role, name, estimate.factor(program))
                assert 0.1 < estimate.factor(program) < 10
            assert predicted["layout"].argument == programs[f"{role}/layout"].argument
            assert predicted["layout"].output == pytest.approx(programs[f"{role}/layout"].output, rel=0.01)
            assert predicted["prefill"].output == pytest.approx(programs[f"{role}/prefill"].output, rel=0.01)
            for name in ("update", "score", "sft"):
                sent = wire_bytes_by_kind(predicted[name].traffic, 1)
                seen = wire_bytes_by_kind(programs[f"{role}/{name}"].collectives, 1)
                for kind in ("all-gather", "reduce-scatter"):
                    print(role, name, kind, seen.get(kind, 0.0), sent.get(kind, 0.0))
                    assert sent.get(kind, 0.0) == pytest.approx(seen.get(kind, 0.0), rel=0.05)


def test_gradients_are_summed_over_data_once_on_gpus(job):
    options = options_of("generator.mesh.data=2", "generator.mesh.fsdp=2")
    sized = resized(job, options.config)
    members = axis_members(sized.policies["generator"].placement.train, "data")
    for platform, in_pass in (("gpu", False), ("tpu", True)):
        traffic = estimates.training_estimates(sized, "generator", platform)["update"].traffic
        assert {item.in_pass for item in traffic if item.members == members} == {in_pass}


def test_time_of_what_waits_in_host_memory(job):
    times, policy = TimeModel(A100), job.policies["generator"]
    done = SamplingWorkload(1, 4, 24, (DecodeSegment(8, 32, 10),), shares_prompts=False)
    # Keys and values of 24 + 32 tokens: one layer, two heads of 16, float32. Four groups of devices share 12 copies.
    stays, leaves = (times.sampling_seconds(policy, done._replace(saved=rows)) for rows in (0, 12))
    assert leaves - stays == pytest.approx(2 * 12 / 4 * (56 * 2 * 2 * 16 * 4) / (0.8 * 32e9), rel=0.02)
    passes = update_workload(job, "generator", 0.5)
    programs = {f"generator/{name}": estimate.program()
                for name, estimate in estimates.training_estimates(job, "generator", "gpu").items()}
    stays = trained_seconds(job, programs, A100, "generator", passes)
    options = options_of("generator.mesh.offload=true")
    waiting = trained_seconds(resized(job, options.config), programs, A100, "generator", passes)
    params = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * 4
                 for leaf in jax.tree.leaves(job.policies["generator"].state.params))
    assert waiting["score"] - stays["score"] == pytest.approx(params / (0.8 * 32e9), rel=0.01)
    assert waiting["update"] - stays["update"] == pytest.approx(2 * 2 * params / (0.8 * 32e9), rel=0.01)


def test_choices_of_sampling():
    config = options_of().config.verifier
    model = ModelConfig(10, 32, 1, 2, 2, 16, 64)
    tried = choices.sampling_choices(config, model, local=4, needed_rows=64, samples=3)
    assert tried[0] == choices.chosen(config, choices.SAMPLING_KEYS)
    assert {settings["mesh.decode_tensor"] for settings in tried} == {1, 2}  # two heads, which 4 does not divide
    assert len({tuple(settings.items()) for settings in tried}) == len(tried)
    budgets = [settings for settings in tried if settings["cache_tokens"]]
    assert budgets and len(budgets) < len(tried) - 1
    for settings in tried[1:]:
        groups = 4 // settings["mesh.decode_tensor"]
        assert all(rows % groups == 0 for rows in settings["row_buckets"])
        assert settings["row_buckets"][-1] <= 72  # 64, as a multiple of 4 groups and of 3 samples
        assert settings["cache_tokens"] or settings["row_buckets"][-1] % 3 == 0
    assert choices._ladder(2, 10)[0] == 2 and choices._ladder(2, 10)[-1] == 10
    assert all(low / high >= 0.6 for low, high in itertools.pairwise(choices._ladder(8, 40)))
    assert choices._ladder(5, 5) == [5]


def test_choices_of_training():
    config = options_of().config.generator
    model = ModelConfig(10, 32, 1, 2, 2, 16, 64)
    meshes = choices.mesh_choices(config, model, devices=4, local=4, has_host_memory=True)
    shapes = {(settings["mesh.fsdp"], settings["mesh.tensor"], settings["mesh.offload"]) for settings in meshes[1:]}
    # The configuration's own is fsdp=-1, which is 4.
    assert shapes == {(1, 1, False), (1, 1, True), (2, 1, False), (2, 1, True), (4, 1, True), (1, 2, False),
                      (1, 2, True), (2, 2, False), (2, 2, True)}  # fmt: skip
    assert meshes[0]["mesh.fsdp"] == -1


def test_choices_of_micro_batches():
    """Two rows to a prompt pack best; three rows worse than two, and too badly to be tried."""
    config = options_of().config.generator

    def padded_tokens(rows: int, prompts: int) -> float:
        return 100 + 10 * abs(rows / prompts - 2) + 50 * (rows == 3) - rows

    micro = choices.micro_batch_choices(config, sequences=5, padded_tokens=padded_tokens)
    assert micro[0] == choices.chosen(config, choices.MICRO_BATCH_KEYS)
    assert {tuple(settings.values()) for settings in micro} == {
        (remat, *sizes) for remat in ("none", "dots", "full") for sizes in ((1, 1), (2, 1), (4, 2))
    }
    config.share_prompts = False
    alone = choices.micro_batch_choices(config, 5, padded_tokens)
    assert {settings["prompts_per_micro_batch"] for settings in alone} == {config.prompts_per_micro_batch}


def test_padded_tokens_are_those_of_the_workload(job, pricing):
    config = options_of("generator.rows_per_micro_batch=3", "generator.prompts_per_micro_batch=2").config
    passes = update_workload(resized(job, config), "generator", 0.5)
    assert pricing._padded_tokens("generator", 3, 2) == passes.micro_batches * passes.tokens.total


def test_what_can_be_chosen_is_valid(pricing, parts):
    for (role, _), priced in parts.items():
        assert priced == sorted(priced, key=lambda part: part.seconds)
        for part in priced:
            assert not part.reason, (part.settings, part.reason)
            config = applied(pricing.options.config, {role: part.settings})
            validate(config)


def test_overrides_make_the_settings(pricing, parts):
    for role in ROLES:
        settings = {role: parts[role, "sampling"][-1].settings | parts[role, "training"][-1].settings}
        texts = [text.removeprefix("--config.") for text in overrides(pricing.options.config, settings)]
        assert flatten(load_config(TINY, [*SMALL, *texts])) == flatten(applied(pricing.options.config, settings))


def test_refused_settings_are_named(job):
    options = options_of("generate.samples=4")
    sized = dataclasses.replace(job, config=options.config)
    priced = Pricing(options, sized, is_target=False)
    bad = {"mesh.decode_tensor": 1, "row_buckets": (4, 6), "cache_tokens": 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choices, "sampling_choices", lambda *args: [bad])
        (part,) = priced.parts("generator", "sampling")
    assert "generator.row_buckets=(4, 6) ends in no multiple of generate.samples=4" in part.reason


def test_the_ranking_keeps_to_the_memory(pricing, parts):
    free = pricing.ranking(parts, {}, 1.0, [])
    assert [item.seconds for item in free] == sorted(item.seconds for item in free)
    room = 0.9 * free[0].peak
    small = Pricing(options_of(memory=room), pricing.job, is_target=False)
    tight = small.ranking(parts, {}, 1.0, [])
    assert tight and all(item.peak <= room for item in tight)
    assert tight[0].seconds >= (1 - search.LEAST_GAIN) * free[0].seconds
    assert small.ranking(parts, {}, 1e-6, []) == []
    refused = small.ranking(parts, {}, 1.0, [tight[0].settings])
    assert tight[0].settings not in [item.settings for item in refused]
    # Programs that need more leave room for less.
    names = [f"{role}/update" for role in ROLES]
    corrected = pricing.ranking(parts, dict.fromkeys(names, 3.0), 1.0, [])
    assert corrected[0].peak > free[0].peak or corrected[0].settings != free[0].settings


def test_no_combination_of_parts_is_quicker(pricing, parts):
    """Every combination of a few parts, each estimated as a whole, against what the ranking takes."""
    few = {key: found[:: len(found) // 3] for key, found in parts.items()}
    everything = [
        pricing.estimated({"generator": a.settings | b.settings, "verifier": c.settings | d.settings}, {})
        for a, b, c, d in itertools.product(*(few[role, kind] for role in ROLES for kind in ("sampling", "training")))
    ]
    peaks = sorted(item.peak for item in everything)
    for memory in (peaks[len(peaks) // 4], peaks[-1]):
        small = Pricing(options_of(memory=memory), pricing.job, is_target=False)
        (first, *_) = small.ranking(few, {}, 1.0, [])
        quickest = min(item.seconds for item in everything if item.peak <= memory)
        assert first.peak <= memory
        assert quickest <= first.seconds <= (1 + search.LEAST_GAIN) * quickest


def test_of_settings_about_as_quick_the_simplest(pricing, parts):
    ranking = pricing.ranking(parts, {}, 1.0, [])
    ordered = simplest_first(pricing.options.config, ranking)
    assert sorted(map(id, ordered)) == sorted(map(id, ranking))
    near = [item for item in ranking if item.seconds <= (1 + search.LEAST_GAIN) * ranking[0].seconds]
    counts = [len(overrides(pricing.options.config, item.settings)) for item in near]
    assert len(overrides(pricing.options.config, ordered[0].settings)) == min(counts)


def test_a_search_finds_something_quicker(found):
    assert found.given.plan.fits and len(found.compiled) == 1
    assert found.best.is_compiled and found.best.plan.fits
    assert found.best.seconds < 0.8 * found.given.seconds  # of 32 rows of a role, 4 at a time
    assert overrides(found.options.config, found.best.settings)
    assert found.best.plan.options.config.generator.row_buckets[-1] > 4


def test_a_search_in_json(found):
    report = json.loads(json.dumps(search_as_json(found)))
    assert report["found"] is True and report["plan"]["fits"] is True
    assert report["overrides"] == overrides(found.options.config, found.best.settings)
    assert report["compiled"][0]["hours"] < report["given"]["hours"] and report["given"]["overrides"] == []
    assert report["plan"]["predicted_hours"] == pytest.approx(report["compiled"][0]["hours"])
    assert len(report["tried"]) == len(found.parts) > 20
    assert all(item["hours"] >= 0 and item["gib_beside_what_is_resident"] > 0 for item in report["tried"])


def test_a_search_as_tables(found):
    stream = io.StringIO()
    show_search(found, Console(stream=stream))
    text = stream.getvalue()
    for word in ("Sampling of the generator", "Training of the verifier", "Whole settings", "estimated, fits",
                 "compiled, fits", "the configuration as it is", "it fits, as far as virtual CPU devices tell"):
        assert word in text
    assert text.rstrip().endswith("\n".join(f"    '{change}'" if "(" in change else f"    {change}"
                                            for change in overrides(found.options.config, found.best.settings)))
    refused = found._replace(refused=[({"generator": {"row_buckets": (4, 6)}}, "ends in no multiple")])
    nothing = refused._replace(compiled=[], given=found.given._replace(
        plan=found.given.plan._replace(advice=["generator/update needs more"])))
    stream = io.StringIO()
    show_search(nothing, Console(stream=stream))
    for word in ("Refused", "ends in no multiple", "nothing that was compiled fits", "compiled, does not fit"):
        assert word in stream.getvalue()


def test_the_command_searches(found, monkeypatch, capsys):
    monkeypatch.setattr(plan, "search", lambda options, console: found)
    plan.main([f"--config={TINY}", "--target=a100-80gb:8", "--search", "--json"])
    assert json.loads(capsys.readouterr().out)["found"] is True
    plan.main([f"--config={TINY}", "--target=a100-80gb:8", "--search"])
    assert "instead of" in capsys.readouterr().out


def test_what_does_not_fit_or_compile_is_not_tried_again(pricing, monkeypatch):
    """The first turns out not to fit, the second does not compile, the third is fine."""
    outcomes = iter(["given", "does not fit", "does not compile", "fits", "fits"])

    class Compiler:
        factors, last_seconds = {}, 0.0

        def __init__(self, options, devices, console):
            pass

        def compiled(self, config, settings, job):
            outcome = next(outcomes)
            if outcome == "does not compile":
                raise jax.errors.JaxRuntimeError("INTERNAL: a fault\nmore")
            item = pricing.estimated(settings, {})._replace(is_compiled=True)
            failed = item.plan._replace(advice=["generator/update needs more"])
            return item._replace(plan=failed) if outcome == "does not fit" else item

    monkeypatch.setattr(search, "_Compiler", Compiler)
    monkeypatch.setattr(search, "LEAST_GAIN", 1e-9)
    found = search.search(pricing.options, Console(enabled=False))
    assert [item.plan.fits for item in found.compiled[:2]] == [False, True]
    settings = [item.settings for item in found.compiled] + [values for values, _ in found.refused]
    assert len({str(values) for values in settings}) == len(settings)
    assert [reason for _, reason in found.refused] == ["does not compile: INTERNAL: a fault"]
    assert found.best in found.compiled[1:]
