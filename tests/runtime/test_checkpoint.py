"""Checkpoints: what is restored is bit-equal, and no kill, full disk or flipped byte loses a good step."""

import logging
import os
import shutil
import threading
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from support.tiny_checkpoints import full_disk, save_step
from tango_jax.runtime import checkpoint as checkpoint_lib
from tango_jax.runtime.checkpoint import Checkpointer, CheckpointError, read_state
from tango_jax.runtime.sealed import MANIFEST, newest_verified, seal
from tango_jax.runtime.timers import CompileCounter
from tango_jax.runtime.trees import tree_fingerprint


class Moments(NamedTuple):
    count: jax.Array
    mu: dict


class Empty(NamedTuple):
    pass


def make_state(seed: int) -> dict:
    rng = np.random.default_rng(seed)
    weights = {"kernel": rng.normal(size=(6, 4)).astype(np.float32), "bias": np.ones(4, jax.numpy.bfloat16)}
    return jax.device_put({
        "generator": {"params": weights, "opt_state": (Moments(np.int32(seed), dict(weights)), Empty())},
        "ema": np.array([seed, 2 * seed], np.float32), "unused": None,
    })


def abstract(state) -> dict:
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding), state)


def flip_a_byte(step_dir: Path) -> str:
    """Damage a file that holds array data; its name inside the step."""
    path = next((step_dir / "state" / "d").iterdir())
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return str(path.relative_to(step_dir))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def two_steps(tmp_path) -> Checkpointer:
    """A directory with good steps 10 and 20."""
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(10, make_state(1), {"phase": "warmup"})
    checkpointer.save(20, make_state(2), {"phase": "rl"})
    checkpointer.wait()
    return checkpointer


def test_restored_state_is_bit_equal_and_compiles_nothing(tmp_path):
    state, meta = make_state(3), {"cursor": {"next_index": 7}, "alpha": 0.1, "name": "a"}
    with CompileCounter() as compiles:
        save_step(tmp_path, 4, state, meta)
        restored = Checkpointer(tmp_path).restore(abstract(state))
    assert (restored.step, restored.meta, compiles.compilations) == (4, meta, [])
    assert jax.tree.structure(restored.state) == jax.tree.structure(state)
    assert tree_fingerprint(restored.state) == tree_fingerprint(state)
    assert restored.state["generator"]["params"]["bias"].dtype == jax.numpy.bfloat16


def test_empty_directory_restores_nothing(tmp_path):
    checkpointer = Checkpointer(tmp_path / "above" / "new")
    assert checkpointer.restore(abstract(make_state(1))) is None
    assert (checkpointer.steps(), checkpointer.latest_step()) == ([], None)
    assert names(tmp_path) == []  # it is made by the first save
    checkpointer.save(1, make_state(1), {})
    checkpointer.wait()
    assert names(tmp_path / "above" / "new") == ["1"]


def test_keeps_the_newest_steps(two_steps, tmp_path):
    two_steps.save(30, make_state(3), {})
    two_steps.wait()
    assert two_steps.steps() == [20, 30]
    assert names(tmp_path) == ["20", "30"]


def test_a_protected_step_is_kept_besides_and_can_be_read(two_steps, tmp_path):
    two_steps.save(30, make_state(3), {}, protected=10)
    two_steps.save(40, make_state(4), {}, protected=10)
    two_steps.wait()
    assert names(tmp_path) == ["10", "30", "40"]
    read = read_state(tmp_path, abstract(make_state(1)), only=10)
    assert read.step == 10 and tree_fingerprint(read.state) == tree_fingerprint(make_state(1))
    flip_a_byte(tmp_path / "10")
    with pytest.raises(CheckpointError, match="^step 10 in .* is damaged"):
        read_state(tmp_path, abstract(make_state(1)), only=10)
    two_steps.save(50, make_state(5), {}, protected=50)
    two_steps.wait()
    assert names(tmp_path) == ["40", "50"]


@pytest.mark.parametrize("damage", ["flip", "delete", "manifest", "empty"])
def test_damaged_step_is_reported_and_skipped(two_steps, tmp_path, caplog, damage):
    if damage == "flip":
        name = flip_a_byte(tmp_path / "20")
    elif damage == "delete":
        name = "_CHECKPOINT_METADATA"
        (tmp_path / "20" / name).unlink()
    else:
        name = MANIFEST
        (tmp_path / "20" / name).write_text("not a manifest\n" if damage == "manifest" else "")
    with caplog.at_level(logging.WARNING, "tango_jax.runtime.sealed"):
        restored = two_steps.restore(abstract(make_state(1)))
    assert restored.step == 10 and tree_fingerprint(restored.state) == tree_fingerprint(make_state(1))
    [record] = [record for record in caplog.records if record.name == "tango_jax.runtime.sealed"]
    assert name in record.getMessage() and "falling back to step 10" in record.getMessage()


def test_a_step_that_lost_its_manifest_is_damaged(two_steps, tmp_path, caplog):
    (tmp_path / "20" / MANIFEST).unlink()
    assert two_steps.restore(abstract(make_state(1))).step == 10
    assert "20 is damaged: manifest.sha256 cannot be read (No such file or directory); falling back" in caplog.text
    two_steps.save(20, make_state(2), {})
    two_steps.wait()
    assert two_steps.steps() == [10, 20]


@pytest.mark.parametrize("call", ["peek", "restore"])
def test_steps_without_any_manifest_are_no_fresh_start(two_steps, tmp_path, call):
    for step in ("10", "20"):
        (tmp_path / step / MANIFEST).unlink()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match="every checkpoint in .* is damaged"):
        getattr(Checkpointer(tmp_path), call)(abstract(make_state(1)))
    with pytest.raises(CheckpointError, match="every checkpoint in .* is damaged"):
        read_state(tmp_path, abstract(make_state(1)))
    assert sorted(tmp_path.rglob("*")) == before


def test_an_older_steps_content_under_a_newer_number_is_damage(two_steps, tmp_path, caplog):
    shutil.rmtree(tmp_path / "20")
    shutil.copytree(tmp_path / "10", tmp_path / "20")
    restored = Checkpointer(tmp_path).restore(abstract(make_state(1)))
    assert restored.step == 10 and tree_fingerprint(restored.state) == tree_fingerprint(make_state(1))
    assert "20 is damaged: it holds step 10; falling back to step 10" in caplog.text
    shutil.rmtree(tmp_path / "10")
    with pytest.raises(CheckpointError, match="every checkpoint in .* is damaged"):
        Checkpointer(tmp_path).restore(abstract(make_state(1)))


def test_all_damaged_is_an_error(two_steps, tmp_path):
    flip_a_byte(tmp_path / "10")
    flip_a_byte(tmp_path / "20")
    with pytest.raises(CheckpointError, match="every checkpoint in .* is damaged"):
        Checkpointer(tmp_path).restore(abstract(make_state(1)))


@pytest.mark.parametrize(("next_step", "left"), [(15, [10, 15]), (20, [10, 20])])
def test_saving_after_a_fallback_replaces_the_damaged_step(two_steps, tmp_path, next_step, left):
    flip_a_byte(tmp_path / "20")
    two_steps.restore(abstract(make_state(1)))
    two_steps.save(next_step, make_state(5), {})
    two_steps.wait()
    assert names(tmp_path) == [str(step) for step in left]
    restored = Checkpointer(tmp_path).restore(abstract(make_state(1)))
    assert restored.step == next_step and tree_fingerprint(restored.state) == tree_fingerprint(make_state(5))


def test_a_later_good_step_is_never_overtaken(two_steps, tmp_path):
    with pytest.raises(CheckpointError, match="later step 20"):
        Checkpointer(tmp_path).save(5, make_state(5), {})
    assert names(tmp_path) == ["10", "20"]


def changed(name: str) -> dict:
    state = make_state(1)
    params = state["generator"]["params"]
    if name == "shape":
        params["kernel"] = np.zeros((6, 8), np.float32)
    elif name == "dtype":
        params["kernel"] = np.zeros((6, 4), jax.numpy.bfloat16)
    elif name == "missing":
        params["scale"] = np.zeros((3,), np.float32)
    else:
        del params["kernel"]
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), state)


@pytest.mark.parametrize(("name", "expected"), [
    ("shape", "generator/params/kernel: checkpoint float32[6,4], this run float32[6,8]"),
    ("dtype", "generator/params/kernel: checkpoint float32[6,4], this run bfloat16[6,4]"),
    ("missing", "generator/params/scale: checkpoint has none, this run float32[3]"),
    ("extra", "generator/params/kernel: checkpoint float32[6,4], this run has none"),
])
def test_checkpoint_of_another_model_is_refused(two_steps, tmp_path, name, expected):
    with pytest.raises(CheckpointError, match="another model or optimizer: 1 of") as error:
        two_steps.restore(changed(name))
    assert expected in str(error.value)
    assert names(tmp_path) == ["10", "20"]


def test_a_glance_tells_the_record_and_loads_no_array(two_steps, tmp_path, monkeypatch):
    state = make_state(2)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_lib, "_load", None)
        glance = two_steps.peek(abstract(state))
        assert (glance.step, glance.state, glance.meta) == (20, None, {"phase": "rl"})
        with pytest.raises(CheckpointError, match="another model or optimizer"):
            two_steps.peek(abstract(changed("ema")))
    assert Checkpointer(tmp_path / "new").peek(abstract(state)) is None


def test_a_glance_believes_nothing_that_is_not_verified(two_steps, tmp_path, caplog):
    """A changed name of an array must not look like another model, while the step before is good."""
    path = tmp_path / "20" / "record" / "metadata"
    path.write_bytes(path.read_bytes().replace(b"generator/params/kernel", b"generator/params/kernek"))
    checkpointer = Checkpointer(tmp_path)
    assert checkpointer.peek(abstract(make_state(1))).step == 10
    assert checkpointer.restore(abstract(make_state(1))).step == 10
    [record] = [record for record in caplog.records if record.name == "tango_jax.runtime.sealed"]  # said once
    assert "record/metadata has changed since it was written; falling back to step 10" in record.getMessage()


def test_a_restore_after_a_glance_reads_the_bytes_again_only_where_files_were_touched(two_steps, tmp_path, monkeypatch):
    reads = []
    monkeypatch.setattr(checkpoint_lib, "newest_verified", lambda *path: reads.append(path) or newest_verified(*path))
    two_steps.peek(abstract(make_state(2)))
    assert two_steps.restore(abstract(make_state(2))).step == 20 and len(reads) == 1
    two_steps.peek(abstract(make_state(2)))
    assert len(reads) == 1
    flip_a_byte(tmp_path / "20")
    assert two_steps.restore(abstract(make_state(2))).step == 10 and len(reads) == 2
    two_steps.save(30, make_state(3), {})
    two_steps.wait()
    assert two_steps.restore(abstract(make_state(2))).step == 30 and len(reads) == 3


def test_a_failed_save_after_a_fallback_names_the_step_that_is_good(two_steps, tmp_path, monkeypatch):
    flip_a_byte(tmp_path / "20")
    two_steps.restore(abstract(make_state(1)))

    monkeypatch.setattr(checkpoint_lib, "seal", full_disk)
    with pytest.raises(CheckpointError, match=r"the last good checkpoint \(step 10\) is kept"):
        two_steps.save(15, make_state(2), {})
        two_steps.wait()


def test_restore_onto_another_mesh(two_steps):
    devices = np.array(jax.devices())
    mesh = Mesh(devices[:2], ("fsdp",))
    target = abstract(make_state(2))
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    target["generator"]["params"]["kernel"] = jax.ShapeDtypeStruct((6, 4), np.float32, sharding=sharding)
    restored = two_steps.restore(target)
    kernel = restored.state["generator"]["params"]["kernel"]
    assert kernel.sharding == sharding and kernel.addressable_shards[0].data.shape == (3, 4)
    assert tree_fingerprint(restored.state) == tree_fingerprint(make_state(2))


def test_one_branch_is_read_without_the_rest(two_steps, tmp_path):
    before = names(tmp_path)
    target = abstract(make_state(2)["generator"]["params"])
    restored = read_state(tmp_path, target, part=("generator", "params"))
    assert (restored.step, restored.meta) == (20, {"phase": "rl"})
    assert tree_fingerprint(restored.state) == tree_fingerprint(make_state(2)["generator"]["params"])
    assert names(tmp_path) == before
    with pytest.raises(CheckpointError, match="no part 'teacher/'; its top-level names are ema, generator"):
        read_state(tmp_path, target, part=("teacher",))


def test_reading_leaves_a_save_in_progress_alone(two_steps, tmp_path):
    (tmp_path / "30.saving").mkdir()
    assert read_state(tmp_path, abstract(make_state(2))).step == 20
    assert names(tmp_path) == ["10", "20", "30.saving"]
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        read_state(tmp_path / "elsewhere", {})


def test_leftovers_of_a_kill_are_removed_and_a_replaced_step_comes_back(two_steps, tmp_path):
    (tmp_path / "30.saving.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    os.replace(tmp_path / "20", tmp_path / "20.replaced")  # killed between the two renames of a replacement
    checkpointer = Checkpointer(tmp_path)
    assert names(tmp_path) == ["10", "20"]
    assert checkpointer.restore(abstract(make_state(2))).step == 20


def test_nothing_is_saved_in_a_directory_that_was_removed_meanwhile(two_steps, tmp_path, monkeypatch):
    """Orbax makes the folders above what it writes; a step there would be one of a run without settings or metrics."""

    def remove_first(path, step, digests):
        shutil.rmtree(tmp_path)
        path.mkdir(parents=True)
        seal(path, step, {})

    monkeypatch.setattr(checkpoint_lib, "seal", remove_first)
    with pytest.raises(CheckpointError, match="no longer exists: was it removed"):
        two_steps.save(30, make_state(3), {})
        two_steps.wait()
    assert names(tmp_path) == []


def test_a_second_ctrl_c_leaves_no_half_step(two_steps, tmp_path, monkeypatch):
    """The first one sets a flag (runtime/termination.py)."""
    is_written, go_on = threading.Event(), threading.Event()

    def wait_and_seal(folder, step, digests):
        is_written.set()
        go_on.wait(60)
        seal(folder, step, digests)

    monkeypatch.setattr(checkpoint_lib, "seal", wait_and_seal)
    with pytest.raises(KeyboardInterrupt), two_steps:
        two_steps.save(30, make_state(3), {})
        is_written.wait(60)
        raise KeyboardInterrupt
    assert names(tmp_path) == ["10", "20"]
    go_on.set()
    with pytest.raises(CheckpointError, match="could not save step 30"):
        two_steps.wait()
    two_steps.save(30, make_state(3), {})
    two_steps.wait()
    assert two_steps.steps() == [20, 30]


def test_impossible_settings_are_refused(tmp_path):
    with pytest.raises(ValueError, match="keep=0"):
        Checkpointer(tmp_path, keep=0)
    with pytest.raises(ValueError, match="bucket address: mount it"):
        Checkpointer("gs://bucket/run")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot use checkpoint directory"):
        Checkpointer(tmp_path / "file")
    with pytest.raises(TypeError):
        Checkpointer(tmp_path).save(1, make_state(1), {"when": object()})


def test_tree_hash_sees_names_shapes_dtypes_and_bits():
    base = {"a": np.zeros(4, np.float32), "b": np.arange(2, dtype=np.int32)}
    assert tree_fingerprint(base) == tree_fingerprint({"b": jax.numpy.arange(2), "a": jax.numpy.zeros(4)})
    others = [{"c": base["a"], "b": base["b"]}, {**base, "a": base["a"].reshape(2, 2)},
              {**base, "a": base["a"].astype(np.int32)}, {**base, "a": -base["a"]},
              {**base, "b": base["b"][::-1]}]
    assert len({tree_fingerprint(tree) for tree in [base, *others]}) == 6
