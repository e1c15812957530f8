"""One branch of a checkpoint, array by array: what is opened, what is verified, and what damage does."""

from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tango_jax.runtime import checkpoint, sealed, stored_arrays
from tango_jax.runtime.checkpoint import Checkpointer, CheckpointError, open_state, read_state
from tango_jax.runtime.sealed import find_damage
from tango_jax.runtime.stored_arrays import STATE, VALUES, files_with
from tango_jax.runtime.trees import tree_fingerprint
from tango_jax.runtime.unread import load_all

PART = ("verifier", "params")


def make_state(seed: int) -> dict:
    rng = np.random.default_rng(seed)

    def tree() -> dict:  # too large to be stored among the names
        return {"kernel": rng.normal(size=(64, 32)).astype(np.float32),
                "norm": rng.normal(size=(8, 100)).astype(jax.numpy.bfloat16), "few": np.arange(3, dtype=np.int32)}

    return jax.device_put({role: {"params": tree(), "moments": tree()} for role in ("generator", "verifier")})


def abstract(tree, sharding=None):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """Steps 10 and 20 in several files, and an array in several chunks, as those of a large model are."""
    monkeypatch.setattr(checkpoint, "DATA_FILE_BYTES", 4096)
    with Checkpointer(tmp_path) as checkpointer:
        for step in (10, 20):
            checkpointer.save(step, make_state(step), {"turn": step})
    return tmp_path


def files_of(directory, prefix: str = "") -> set[str]:
    return files_with(directory / "20", prefix)


def flip_a_byte(path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["sub/../run", "link", "link/../../run"])
def test_a_directory_may_be_named_by_a_link_or_with_dots(tmp_path, monkeypatch, name):
    (tmp_path / "sub/run").mkdir(parents=True)
    (tmp_path / "link").symlink_to("sub/run")
    monkeypatch.chdir(tmp_path)
    named, state = Path(name), make_state(1)
    with Checkpointer(named) as checkpointer:
        checkpointer.save(1, state, {})
    with Checkpointer(named) as checkpointer:
        assert tree_fingerprint(checkpointer.restore(abstract(state)).state) == tree_fingerprint(state)
    assert tree_fingerprint(read_state(named, abstract(state)).state) == tree_fingerprint(state)
    found = open_state(named, abstract(state["verifier"]["params"]), PART)
    assert tree_fingerprint(load_all(found.state)) == tree_fingerprint(state["verifier"]["params"])
    assert checkpoint.peek_meta(named).step == sealed.newest_verified(named, part=PART) == 1


def test_nothing_else_is_opened_or_verified(directory, monkeypatch):
    wanted, opened, hashed, sha256 = make_state(20)["verifier"]["params"], [], [], sealed._sha256
    open_fn = stored_arrays.ts.open

    def record(spec, **options):
        opened.append(spec["kvstore"]["path"])
        return open_fn(spec, **options)

    monkeypatch.setattr(stored_arrays.ts, "open", record)
    monkeypatch.setattr(sealed, "_sha256", lambda path: hashed.append(path) or sha256(path))
    found = open_state(directory, abstract(wanted), PART)
    assert (found.step, found.meta, opened) == (20, {"turn": 20}, [])
    values = {str(path.relative_to(directory / "20")) for path in hashed if VALUES.match(
        str(path.relative_to(directory / "20")))}
    assert values == files_of(directory, "verifier/params/") and values < files_of(directory)
    assert np.asarray(found.state["kernel"].load()).tobytes() == np.asarray(wanted["kernel"]).tobytes()
    assert opened == ["verifier/params/kernel/"]
    assert tree_fingerprint(load_all(found.state)) == tree_fingerprint(wanted) == tree_fingerprint(found.state)
    assert {path.split("/")[0] for path in opened} == {"verifier"}


def test_parts_of_an_array_for_several_devices(directory):
    wanted = make_state(20)["verifier"]["params"]["kernel"]
    sharding = NamedSharding(Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b")), PartitionSpec("b", "a"))
    found = open_state(directory, {"kernel": abstract(wanted, sharding)} | {
        name: abstract(leaf) for name, leaf in make_state(20)["verifier"]["params"].items() if name != "kernel"}, PART)
    array = found.state["kernel"].load()
    assert array.sharding == sharding
    np.testing.assert_array_equal(array, wanted)


def test_damage_counts_where_it_is_read(directory, caplog):
    wanted = make_state(20)["verifier"]["params"]
    for name in files_of(directory) - files_of(directory, "verifier/params/"):
        flip_a_byte(directory / "20" / name)
    assert open_state(directory, abstract(wanted), PART).step == 20 and not caplog.text
    with pytest.raises(CheckpointError, match="another model or optimizer"):
        open_state(directory, abstract({"kernel": wanted["kernel"]}), PART)
    assert read_state(directory, abstract(wanted), PART).step == 10  # what trains on verifies all
    caplog.clear()
    name = max(files_of(directory, "verifier/params/"))
    flip_a_byte(directory / "20" / name)
    found = open_state(directory, abstract(wanted), PART)
    assert found.step == 10 and f"{name} has changed since it was written; falling back to step 10" in caplog.text
    assert tree_fingerprint(found.state) == tree_fingerprint(make_state(10)["verifier"]["params"])


@pytest.mark.parametrize("name", [f"{STATE}/manifest.ocdbt", "record/metadata", f"{STATE}/d"])
def test_damage_of_what_says_where_arrays_are(directory, name):
    path = directory / "20" / name
    path = next(path.iterdir()) if path.is_dir() else path
    flip_a_byte(path)
    name = path.relative_to(directory / "20")
    assert find_damage(directory / "20", part=PART) == f"{name} has changed since it was written"
