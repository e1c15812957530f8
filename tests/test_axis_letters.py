"""A letter at the end of an array's name means one axis everywhere: the one that tango_jax/README.md says."""

import ast
import functools
import re
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from support import tiny_sampler, update_cases
from support.axis_sizes import checked_sizes, letters_of, sizes_of
from support.paths import ROOT
from tango_jax.config import default_config
from tango_jax.evaluation import voting
from tango_jax.models import decode_layers
from tango_jax.rl.algorithms import ALGORITHMS
from tango_jax.rl.losses import WEIGHT_KINDS, token_weights_BT
from tango_jax.rl.packing import BatchShape, PackShape, empty_batch
from tango_jax.rl.score import micro_batch
from tango_jax.rl.update import LossConfig, make_policy_loss
from tango_jax.sampling import decode, slots
from tango_jax.sampling.buckets import Shape
from tango_jax.sampling.logits import sampling_params
from tango_jax.sampling.request import SampleRequest, pad_request
from tango_jax.tracking.intervals import bootstrap_means, gap_share, paired_differences, ratio

PACKAGE = ROOT / "tango_jax"
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


LEGEND = "BPMTVLDFHKGESWZRQXNYIOUJCA"


def names_of(tree: ast.AST) -> Iterator[str]:
    """All names of variables, arguments, attributes, functions and keywords."""
    fields = {ast.Name: "id", ast.arg: "arg", ast.Attribute: "attr", ast.FunctionDef: "name", ast.keyword: "arg"}
    for node in ast.walk(tree):
        if type(node) in fields and (name := getattr(node, fields[type(node)])):
            yield name


def without_legend(tree: ast.AST, legend: str) -> list[str]:
    """Names that end in a letter which the legend lacks."""
    return sorted({name for name in names_of(tree) if set(letters_of(name)) - set(legend) - set("12")})


def assigned_letters(tree: ast.AST) -> set[str]:
    """One-letter names in capitals that are given a value."""
    stored = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return {name for name in stored | {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
            if re.fullmatch("[A-Z]", name)}


def imported_letters(tree: ast.AST) -> set[str]:
    """One-letter names in capitals that stand for something imported."""
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))
    return {alias.asname for node in imports for alias in node.names if re.fullmatch("[A-Z]", alias.asname or "")}


# -------------------------------------------------------------------------------------------------------- the legend


def test_every_suffix_and_every_size_has_its_letters_in_the_legend():
    names = {str(path.relative_to(ROOT)): without_legend(tree, LEGEND) for path, tree in TREES.items()}
    assert {path: found for path, found in names.items() if found} == {}
    sizes = {str(path.relative_to(ROOT)): assigned_letters(tree) - set(LEGEND) for path, tree in TREES.items()}
    assert {path: found for path, found in sizes.items() if found} == {}


def test_shapes_in_comments_use_letters_of_the_legend():
    """Such as float32[B, T] and [Z, Q*X + R*T]."""
    for path in TREES:
        text = path.read_text(encoding="utf-8")
        shapes = re.findall(r"\[((?:[A-Z]|\.\.)(?:, [A-Z0-9 *+/]+)+)\]", text)
        unknown = {letter for shape in shapes for letter in re.findall("[A-Z]", shape)} - set(LEGEND)
        assert not unknown, (path, unknown)


def test_every_letter_of_the_legend_is_used():
    used = {letter for tree in TREES.values() for name in names_of(tree) for letter in letters_of(name)}
    shaped = "L" if "# L x [" in (PACKAGE / "models/cache.py").read_text() else ""  # a list, not an axis of an array
    assert used - set("12") | set(shaped) == set(LEGEND)


def test_a_letter_that_the_legend_lacks_is_found():
    tree = ast.parse("def f(x_BT, *, y_BÖ=0):\n    z_TX = x_BT[self.w_B1].f(v_Q=1)")
    assert without_legend(tree, "BT") == ["v_Q", "z_TX"] and without_legend(tree, "BTXQ") == []
    assert letters_of("INT8_DTYPES") == letters_of("some_ABCd") == letters_of("x_") == "" and letters_of("x_B1") == "B1"
    assert assigned_letters(ast.parse("def f(N): P, (m, Q) = x[T]")) == {"N", "P", "Q"}


def test_a_letter_is_a_size_or_an_import_of_a_file_but_not_both():
    """`P` is jax's PartitionSpec only where no array has prompts."""
    assert imported_letters(ast.parse("from a import b as P, c as d")) == {"P"}
    for path, tree in TREES.items():
        letters = {letter for name in names_of(tree) for letter in letters_of(name)} | assigned_letters(tree)
        assert not letters & imported_letters(tree), path


# ------------------------------------------------------------------------------------------------------- their sizes


@pytest.fixture
def checked():
    """The functions that ran with arrays that have letters; the test fails where a letter had two sizes in one."""
    with checked_sizes() as (seen, wrong):
        yield seen
    assert not wrong, "\n".join(sorted(set(wrong)))


def test_a_letter_with_two_sizes_is_found():
    arrays = {"x_BT": np.zeros((2, 3)), "y_T": np.zeros(4), "z_B1": np.zeros((1, 2))}
    sizes, wrong = sizes_of(arrays | {"B": 2, "f_T": len})
    assert sizes == {"B": 2, "T": 3}
    assert wrong == ["y_T has shape (4,), and T is 3", "z_B1 has shape (1, 2), and 1 is 1"]
    assert sizes_of({"x_BT": np.zeros(3)})[1] == ["x_BT has shape (3,)"]
    assert sizes_of({"mask_BT": np.zeros((1, 5)), "x_BT": np.zeros((2, 5))}) == ({"B": 2, "T": 5}, [])


def test_letters_of_records_have_one_size():
    shape = BatchShape(N=2, Z=3, Q=4, X=5, R=6, T=7)
    sizes, wrong = sizes_of(vars(empty_batch(shape)))
    assert not wrong and sizes == shape._asdict()
    state = jax.eval_shape(lambda: decode.empty_state(tiny_sampler.MODEL, 9, rows=6, prompt_bucket=4, cache_bucket=8))
    slot = jax.eval_shape(lambda: slots.empty_slots(tiny_sampler.MODEL, 9, Shape(6, 8)))
    for rows in (state.rows, slot.rows):
        sizes, wrong = sizes_of(vars(rows) | {"prompt_length_B": slot.prompt_length_B})
        assert not wrong and sizes == {"B": 6, "T": 9}


@pytest.mark.parametrize("chunk", [0, 5])
@pytest.mark.parametrize("prompts", [0, 2])
def test_letters_of_an_update_have_one_size(checked, prompts, chunk):
    shape = PackShape(14, 3, prompts, prompt_buckets=(8,)) if prompts else PackShape(14, 3)
    batch = update_cases.make_batch(update_cases.make_data(), shape)
    loss = LossConfig(0.7, 0.2, 0.3, "sequence", 0.1, "k3", 0.1, 2.0, True, chunk)
    loss_fn = make_policy_loss(update_cases.MODEL, loss)
    jax.eval_shape(jax.grad(loss_fn, has_aux=True), update_cases.PARAMS, micro_batch(batch, 0))
    assert {"attend", "token_logps", "_score_logits", "sequence_log_ratio_BT", "kl_BT"} <= checked
    assert ("attend_fn" in checked) >= bool(prompts)


def test_letters_of_sampling_have_one_size(checked):
    model, sampling = tiny_sampler.MODEL, sampling_params(1.0, 0.9)
    weights = decode_layers.split_layers(model, True, tiny_sampler.random_params())
    request = SampleRequest([[5, 6]] * 3, 2, np.zeros(2, np.uint32), 1.0, max_new=[9] * 6, row_numbers=range(6))
    batch = pad_request(request, num_prompts=3, prompt_bucket=4)
    prefix, logits_BV = jax.eval_shape(functools.partial(decode.prefill, model, None), weights, batch)
    begin = functools.partial(decode.begin, model, (1,), 8, 9, None)
    state = decode.DecodeState(prefix, *jax.eval_shape(begin, logits_BV, batch.rows, sampling))
    jax.eval_shape(functools.partial(decode.decode, model, (1,)), weights, state, sampling, np.int32(0))
    fns = slots.make_slot_fns(model, (1,), 4, 9, None)
    read = fns.read.eval_shape(weights, batch.token_PX, batch.length_P)
    numbers = np.zeros(4, np.int32)
    new = slots.NewRows(numbers, numbers, numbers, numbers, numbers, numbers, batch.rows.key_data)
    state = fns.insert.eval_shape(fns.make_empty.eval_shape(Shape(6, 13)), read, numbers, new, sampling)
    state = fns.decode.eval_shape(weights, state, sampling, np.int32(0))
    assert state.rows.token_B.shape == (6,)
    assert {"prefill", "begin", "decode", "decode_slots", "_insert", "sample_token", "keep_mask_BV", "inverse_cdf",
            "apply_rope"} <= checked


def test_letters_of_advantages_have_one_size(checked):
    loss, is_action_BT = default_config().generator.loss, np.ones((6, 5), bool)
    reward_BT = np.where(np.arange(5) % 2, 0.5, 0.0) * np.ones((6, 1))
    for algorithm in ALGORITHMS.values():
        algorithm.outcome_fn(np.arange(6.0), is_action_BT, 2, loss)
        algorithm.step_fn(reward_BT, reward_BT != 0, is_action_BT, 2, loss)
    for kind in WEIGHT_KINDS:
        token_weights_BT(is_action_BT, kind, 5)
    assert {"grpo_step_BT", "rloo_outcome_B", "reinforce_pp_step_BT", "whiten_BT", "token_weights_BT"} <= checked


def test_letters_of_statistics_have_one_size(checked):
    values_OA = np.random.default_rng(0).uniform(size=(7, 3))
    bootstrap_means(values_OA)
    paired_differences(values_OA, values_OA[:, 0])
    arms = [{(start, seed): float(scale * (1 + start + seed)) for start in range(3) for seed in range(2)}
            for scale in (1, 2, 4)]
    ratio(*arms[:2])
    gap_share(*arms)
    ballot = voting.Ballot(np.array([0, 1, 1, 2]), np.array([True, False, False, False]), {"a": np.arange(4.0)})
    assert voting.selection_accuracies(ballot, 2)["pass"] == 0.5
    assert {"resample", "_ratio", "independent_means", "weighted_vote", "best_of"} <= checked
