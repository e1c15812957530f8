"""The configs of published settings: numbers typed by hand, models and batches by shape alone, no weights."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from support.paths import ROOT, ROWS
from tango_jax.cli.command_line import load_config
from tango_jax.cli.validation import validate
from tango_jax.data.problem_sets import BENCHMARKS
from tango_jax.method.own_arm import make_schedule
from tango_jax.planning.sources import blank_tokenizer
from tango_jax.rl.optimizer import learning_rate
from tango_jax.rl.packing import TrainSequence, pack, pack_shape, sft_pack_shape
from tango_jax.rl.policy import make_policy
from tango_jax.rl.schedule import alpha_at
from tango_jax.rl.supervised import make_sft
from tango_jax.sharding.placement import TRAIN_AXES, check_model, resolve_axes
from tango_jax.tasks import last_letter
from tango_jax.weights.presets import preset_model
from tango_jax.weights.source import NUMERICS, Source

ROLES = ("generator", "verifier")
MATH = ("qwen2_5_math_7b", "llama3_1_8b")
ALL = (*MATH, "qwen2_5_1_5b_last_letter")

PARAMETERS = {
    "Qwen/Qwen2.5-Math-7B": 7_615_616_512,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
}
CHECKPOINTS = {
    "qwen2_5_math_7b": ("Qwen/Qwen2.5-Math-7B", "Qwen/Qwen2.5-7B"),
    "llama3_1_8b": ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
    "qwen2_5_1_5b_last_letter": ("Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-1.5B"),
}


def resolved(name: str, argument: str = "", overrides: tuple[str, ...] = ()):
    config = load_config(str(ROOT / "configs" / f"{name}.py") + (f":{argument}" if argument else ""), overrides)
    validate(config)
    return config


def abstract_policy(role: str, config):
    """The role's policy on its published architecture, without weights or tokenizer files."""
    model = preset_model(config.checkpoint, **{name: config.model[name] for name in NUMERICS if name in config.model})
    source = Source(config.checkpoint, model, blank_tokenizer(model), None, lambda target: None, {})
    return make_policy(role, config, source)


def abstract_batch(shape, rows: int, prompts: int, max_prompt: int, max_response: int, shards: int):
    """Shapes of the batch that the loop would pack from `rows` responses, the longest prompt among them."""
    longest = TrainSequence([1] * max_prompt, np.ones(max_response, np.int32), np.ones(max_response, np.float32))
    batch = pack([longest], shape, rows, prompts, shards)
    assert batch.num_micro == 1 and batch.position_NZRT.max() == max_prompt + max_response - 1
    return jax.eval_shape(lambda batch: batch, batch)


@pytest.mark.parametrize("argument", ["", "grpo", "rloo", "reinforce_pp"])
@pytest.mark.parametrize("name", MATH)
def test_the_published_table(name, argument):
    config = resolved(name, argument)
    generator, verifier, rl = config.generator, config.verifier, config.rl
    is_reinforce_pp = argument == "reinforce_pp"
    assert (generator.checkpoint, verifier.checkpoint) == CHECKPOINTS[name]
    assert (generator.max_prompt, generator.max_response) == (2048, 2048)
    assert (verifier.max_prompt, verifier.max_response) == (4096, 4096)
    for role in (generator, verifier):
        adam, loss = role.optimizer, role.loss
        assert (adam.lr, adam.warmup_steps, adam.clip_norm) == (1e-6, 0, 1.0)
        assert (loss.clip_low, loss.clip_high, loss.minibatches, loss.epochs) == (0.2, 0.2, 1, 1)
        assert (loss.kl_coef, loss.kl_kind) == (0.001, "k2" if is_reinforce_pp else "k3")
        assert loss.entropy_coef == (0.0 if is_reinforce_pp else 0.001)
        assert (loss.algorithm, loss.aggregation, loss.ratio) == (argument or "grpo", "token_mean", "token")
        assert (role.temperature, role.top_p, role.top_k, role.use_chat) == (1.0, 1.0, 0, False)
        assert (role.model.param_dtype, role.model.compute_dtype) == ("float32", "bfloat16")
        assert (role.logp_chunk, role.template) == (2048, "math")
    assert (rl.prompts_per_step, rl.samples_per_prompt, rl.verifications_per_solution) == (256, 5, 1)
    assert (rl.warmup_steps, rl.generator_steps) == (40, 300)
    assert (rl.generator_turns_per_cycle, rl.verifier_turns_per_cycle) == (3, 1)
    assert (rl.alpha_initial, rl.alpha_final) == (0.5 if is_reinforce_pp else 0.1, 1e-3)
    assert rl.alpha_schedule == "exponential"
    assert (rl.gamma, rl.outcome_weight, rl.format_weight) == (0.8, 1.0, 0.0)
    assert config.eval.every == 10
    assert (config.task.name, config.task.train, config.task.min_steps) == ("math", "eurus_train", 3)
    assert {config.task.train, config.task.test} <= set(BENCHMARKS)
    sft = generator.sft
    assert (sft.steps, sft.batch_size, sft.pack_length, verifier.sft.steps) == (800, 64, 4096, 0)
    assert (sft.optimizer.lr, sft.optimizer.schedule, sft.optimizer.warmup_steps) == (5e-6, "cosine", 80)


def test_an_algorithm_without_published_setting():
    for name in MATH:
        with pytest.raises(ValueError, match="no published setting for 'ppo': write nothing or one of grpo, rloo, "):
            resolved(name, "ppo")


@pytest.mark.parametrize("name", MATH)
def test_stage_one_runs_alone_or_comes_from_a_workdir(name):
    """The two commands of the docstring: text to imitate instead of a workdir, and the same folder in both."""
    text = (ROOT / "configs" / f"{name}.py").read_text()
    assert resolved(name).generator.init_from == f"runs/{name}_sft" and f"--workdir=runs/{name}_sft\n" in text
    rows = ROWS / "tagged.jsonl"
    alone = ("generator.init_from=", f"task.stage_one={rows}", "task.validation=1")
    assert resolved(name, overrides=alone).generator.init_from == ""
    with pytest.raises(ValueError, match=r"generator\.sft\.steps=800 needs text to imitate"):
        resolved(name, overrides=("generator.init_from=",))


def test_sizes_of_the_last_letter_problems():
    config = resolved("qwen2_5_1_5b_last_letter")
    task = config.task
    assert (config.generator.checkpoint, config.verifier.checkpoint) == CHECKPOINTS["qwen2_5_1_5b_last_letter"]
    assert (task.name, task.sft_words, task.sft_letters) == ("last_letter", (2, 4), (3, 6))
    assert (task.rl_words, task.rl_letters) == ((2, 10), (3, 10))
    assert (task.test_words, task.test_letters) == ((2, 12), (3, 12))
    assert (config.rl.prompts_per_step, config.rl.samples_per_prompt) == (64, 5)
    for role in (config.generator, config.verifier):
        assert (role.sft.batch_size, role.sft.start, role.optimizer.lr) == (64, "fresh", 1e-6)
        assert (role.model.param_dtype, role.model.compute_dtype) == ("float32", "bfloat16")


def test_every_last_letter_text_fits_whatever_the_tokenizer():
    """A token is a byte or more, so bytes bound tokens; one more for the stop token, three for line ends."""
    config = resolved("qwen2_5_1_5b_last_letter")
    question = " ".join(f"{'a' * 12}#{k}" for k in range(1, 13))
    solution = last_letter.solution_text(["a"] * 12, [1] * 12)
    verification = last_letter.verification_text(["a"] * 12, ["b"] * 12, [1] * 12)
    assert (len(question), len(solution), len(verification)) == (182, 355, 688)
    assert len(question) + 1 <= config.generator.max_prompt and len(solution) + 1 <= config.generator.max_response
    assert len(question) + len(solution) + len("12") + 3 <= config.verifier.max_prompt
    assert len(verification) + 1 <= config.verifier.max_response


@pytest.mark.parametrize("name", ALL)
def test_schedule(name):
    config = resolved(name)
    schedule = make_schedule(config)
    phases = [turn.phase for turn in schedule.turns()]
    assert schedule.num_turns == len(phases) == 440
    assert [phases.count(phase) for phase in ("warmup", "generator", "verifier")] == [40, 300, 100]
    assert phases[:40] == ["warmup"] * 40
    assert phases[40:48] == ["generator", "generator", "generator", "verifier"] * 2
    rl = config.rl
    steps = [turn.generator_step for turn in schedule.turns() if turn.phase == "generator"]
    alphas = [alpha_at(step, 300, rl.alpha_initial, rl.alpha_final, rl.alpha_schedule) for step in steps]
    # 0.1 to 0.001 is a factor of 100 over 300 steps: 10 at the half.
    assert (len(alphas), alphas[0], alphas[150]) == (300, 0.1, pytest.approx(0.01))
    assert alphas[-1] == pytest.approx(0.001 * 100 ** (1 / 300))


@pytest.mark.parametrize("name", ALL)
def test_learning_rates(name):
    config = resolved(name)
    sft = config.generator.sft
    assert sft.optimizer.schedule == "cosine"
    rate = learning_rate(sft.optimizer.lr, sft.optimizer.warmup_steps, sft.steps)
    expected = [0.0, 2.5e-6, 5e-6, 2.5e-6, 0.0]  # linear over 80 steps, then half a cosine over 720
    assert [float(rate(step)) for step in (0, 40, 80, 440, 800)] == pytest.approx(expected, abs=1e-12)
    for role in ROLES:
        rate = learning_rate(config[role].optimizer.lr, config[role].optimizer.warmup_steps)
        assert [float(rate(step)) for step in (0, 1, 439)] == pytest.approx([1e-6] * 3)


@pytest.mark.parametrize("name, rows, generator, verifier", [
    # rows of a batch; then per role: processes or decode batches that share them, micro-batches at most, tokens of a
    # micro-batch
    ("qwen2_5_math_7b", 1280, (4, 1280, 8192), (4, 640, 2 * 8192)),
    ("llama3_1_8b", 1280, (4, 1280, 8192), (4, 640, 2 * 8192)),
    ("qwen2_5_1_5b_last_letter", 320, (1, 80, 4 * 2048), (1, 80, 4 * 2048)),
])
def test_batch_arithmetic(name, rows, generator, verifier):
    config = resolved(name)
    rl = config.rl
    assert rl.prompts_per_step * rl.samples_per_prompt == rows
    for role, (calls, micros, tokens) in ((config.generator, generator), (config.verifier, verifier)):
        assert role.cache_tokens or all(bucket % rl.samples_per_prompt == 0 for bucket in role.row_buckets)
        assert all(bucket % 8 == 0 for bucket in role.row_buckets)  # equal shares on the devices of a node
        assert rows == calls * role.row_buckets[-1]
        shape = pack_shape(role)
        batch = abstract_batch(shape, rows, rl.prompts_per_step, role.max_prompt, role.max_response, shards=1)
        N, _, R, T = batch.token_NZRT.shape
        assert (N, R * T) == (micros, tokens) and shape.joins_prompts
        assert T >= role.max_response + role.max_prompt
    # The verifier reads the problem, the whole solution and its own instructions.
    assert config.verifier.max_prompt >= config.generator.max_response + config.generator.max_prompt


@pytest.mark.parametrize("name, hosts, per_host, axes_of_roles", [  # hosts and devices of each: A100 nodes, v5p hosts
    ("qwen2_5_math_7b", 4, 8, [(1, 32, 1), (1, 8, 4)]), ("qwen2_5_math_7b", 8, 4, [(1, 32, 1), (1, 8, 4)]),
    ("qwen2_5_math_7b", 1, 8, [(1, 8, 1), (1, 2, 4)]), ("llama3_1_8b", 4, 8, [(1, 32, 1), (1, 8, 4)]),
    ("qwen2_5_1_5b_last_letter", 1, 1, 2 * [(1, 1, 1)]), ("qwen2_5_1_5b_last_letter", 1, 8, 2 * [(1, 8, 1)]),
    ("llama3_1_70b_teacher", 1, 8, 2 * [(1, 8, 1)]),
])
def test_meshes_on_the_stated_hardware(name, hosts, per_host, axes_of_roles):
    config = resolved(name)
    for role, axes in zip((config.generator, config.verifier), axes_of_roles, strict=True):
        assert resolve_axes(role.mesh, hosts * per_host) == axes
        placement = SimpleNamespace(train=SimpleNamespace(shape=dict(zip(TRAIN_AXES, axes, strict=True))))
        model = preset_model(role.checkpoint)
        check_model(model, role.mesh, placement)
        assert per_host % axes[2] == per_host % role.mesh.decode_tensor == 0  # such groups stay inside a process
        assert all(rows % (per_host // role.mesh.decode_tensor) == 0 for rows in role.row_buckets)
        assert config.rl.prompts_per_step % hosts == 0  # as many problems for each process


def test_a_mesh_for_nodes_does_not_fit_fewer_devices():
    with pytest.raises(ValueError, match="4 does not divide the 2 devices"):
        resolve_axes(resolved("qwen2_5_math_7b").verifier.mesh, 2)


@pytest.mark.parametrize("name, role", [(name, role) for name in ALL for role in ROLES])
def test_models_by_shape_alone(name, role):
    """Parameter count, dtypes, positions; init, layout, score and update of both stages trace at full size."""
    config = resolved(name)
    settings, rl = config[role], config.rl
    policy = abstract_policy(role, settings)
    model = policy.model_config
    assert (model.compute_dtype, model.param_dtype) == ("bfloat16", "float32") and model.remat in ("dots", "full")
    assert settings.max_prompt + settings.max_response <= model.max_position
    assert sft_pack_shape(settings).row_length <= model.max_position or not settings.sft.steps

    state = jax.eval_shape(policy.init, np.zeros((2,), np.uint32))
    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    assert count == PARAMETERS[settings.checkpoint]
    floats = [leaf for leaf in jax.tree.leaves(state) if np.issubdtype(leaf.dtype, np.floating)]
    assert {leaf.dtype for leaf in floats} == {np.dtype(np.float32)}
    assert sum(leaf.size for leaf in floats) == 3 * count  # weights and two moments
    weights = jax.eval_shape(policy.sampler.layout, state.params)
    assert len(weights["layers"]) == model.num_layers and weights["embed"].dtype == "bfloat16"

    rows = rl.prompts_per_step * rl.samples_per_prompt
    lengths, shards = (settings.max_prompt, settings.max_response), policy.placement.num_local_shards
    batch = abstract_batch(pack_shape(settings), rows, rl.prompts_per_step, *lengths, shards)
    assert jax.eval_shape(policy.score, state.params, batch).shape == batch.token_NZRT.shape
    after, metrics = jax.eval_shape(policy.update, state, batch)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), after) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), state
    )
    assert {"loss", "kl", "entropy", "grad_norm", "logprob_gap_max"} <= set(metrics)

    if settings.sft.steps:
        sft = make_sft(policy)
        shape = sft_pack_shape(settings)
        batch = abstract_batch(shape, settings.sft.batch_size, 0, shape.row_length - 100, 100, shards)
        assert batch.token_NZRT.shape[1:] == (shards, shape.rows, shape.row_length)
        after, _ = jax.eval_shape(sft.update, jax.eval_shape(sft.init, np.zeros((2,), np.uint32)), batch)
        assert sum(leaf.size for leaf in jax.tree.leaves(after.params)) == count


def test_qwen2_5_math_has_4096_positions_and_no_room_for_more():
    settings = resolved("qwen2_5_math_7b", overrides=("generator.max_response=2049",)).generator
    with pytest.raises(ValueError, match=r"2048 \+ max_response 2049 = 4097 exceeds the 4096 positions of Qwen/Qwen2"):
        abstract_policy("generator", settings)


@pytest.mark.parametrize("variant, arm", [
    ("", "grpo"), ("1_5b", "grpo"), ("0_5b-tango", "tango"), ("1_5b-tango", "tango")])
def test_gsm8k_has_the_settings_of_verls_logs(variant, arm):
    config = resolved("qwen2_5_gsm8k", variant)
    own, size = config.generator, "1.5B" if variant.startswith("1_5b") else "0.5B"
    assert (config.arm, own.checkpoint) == (arm, f"Qwen/Qwen2.5-{size}-Instruct")
    assert (config.rl.prompts_per_step, config.rl.samples_per_prompt, config.rl.generator_steps) == (64, 5, 7473 // 64)
    assert (own.model.lora.rank, own.model.lora.alpha, own.model.lora.targets) == (32, 32.0, ())
    assert (own.optimizer.lora_lr, own.optimizer.warmup_steps, own.optimizer.clip_norm) == (3e-5, 0, 1.0)
    assert (own.loss.kl_coef, own.loss.kl_kind, own.loss.entropy_coef, own.loss.aggregation) == (
        0.001, "k3", 0.001, "token_mean")
    assert (own.loss.minibatches, own.loss.epochs, own.loss.clip_low, own.loss.clip_high) == (1, 1, 0.2, 0.2)
    assert (own.max_prompt, own.max_response, own.temperature) == (512, 1024, 1.0)
    assert bool(config.verifier.sft.steps) == (arm == "tango")
