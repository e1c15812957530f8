"""Checkpoints that are written while training goes on: what is saved, when it counts, and what follows an error."""

import gc
import json
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore

from support.paths import ROOT
from support.processes import finish, free_port
from support.tiny_checkpoints import full_disk, save_step
from tango_jax.runtime import checkpoint as checkpoint_lib
from tango_jax.runtime import hosts
from tango_jax.runtime.checkpoint import Checkpointer, CheckpointError
from tango_jax.runtime.sealed import digests_of, find_damage, seal

LONG_S = 60  # a test whose threads wait for each other fails after this


def state_of(value: float) -> dict:
    return {"weights": jnp.full(4096, value, jnp.float32), "count": jnp.int32(value)}


def values(directory: Path) -> tuple[int, set[float]]:
    """Step and values of what a start would find."""
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state_of(0))
    restored = checkpoint_lib.read_state(directory, abstract)
    return restored.step, {*restored.state["weights"].tolist(), float(restored.state["count"])}


@pytest.fixture
def one_step(tmp_path) -> Checkpointer:
    save_step(tmp_path, 1, state_of(1), {})
    return Checkpointer(tmp_path)


@pytest.fixture
def disk(monkeypatch):
    """Its first event is set when something arrives at it; it takes nothing before the second one is set."""
    arrived, go_on = threading.Event(), threading.Event()
    open_array = tensorstore.open

    def open_later(*arguments, **options):
        arrived.set()
        go_on.wait(LONG_S)
        return open_array(*arguments, **options)

    monkeypatch.setattr(tensorstore, "open", open_later)
    yield arrived, go_on
    go_on.set()


def test_training_goes_on_and_donates_what_is_being_written(one_step, tmp_path, disk):
    arrived, go_on = disk
    update = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), donate_argnums=0)
    state, meta = state_of(2), {"cursor": [2]}
    one_step.save(2, state, meta)
    arrived.wait(LONG_S)
    for _ in range(3):
        state = jax.block_until_ready(update(state))
    meta["cursor"].append(5)
    assert one_step.steps() == [1]
    go_on.set()
    one_step.wait()
    assert values(tmp_path) == (2, {2.0})
    assert checkpoint_lib.peek_meta(tmp_path).meta == {"cursor": [2]}
    assert float(state["count"]) == 5


def test_the_next_save_waits_and_older_steps_stay_until_then(tmp_path, disk):
    arrived, go_on = disk
    go_on.set()
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, state_of(1), {})
        checkpointer.wait()
        go_on.clear()
        checkpointer.save(2, state_of(2), {})
        third = threading.Thread(target=checkpointer.save, args=(3, state_of(3), {}))
        third.start()
        third.join(0.2)
        assert third.is_alive() and checkpointer.steps() == [1]
        go_on.set()
        third.join()
    assert checkpointer.steps() == [3] and values(tmp_path) == (3, {3.0})


def test_the_end_of_a_run_waits(one_step, tmp_path):
    with one_step:
        one_step.save(2, state_of(2), {})
    assert values(tmp_path) == (2, {2.0})


def test_a_run_that_is_told_to_stop_waits(one_step, tmp_path):
    with pytest.raises(hosts.Preempted), one_step:
        one_step.save(2, state_of(2), {})
        raise hosts.Preempted
    assert values(tmp_path) == (2, {2.0})


def test_the_newest_step_is_the_one_that_is_being_saved(one_step):
    one_step.save(2, state_of(2), {})
    assert one_step.latest_step() == 2


MESSAGE = r"could not save step 2 .*No space left.*the last good checkpoint \(step 1\) is kept"


@pytest.mark.parametrize("find", [
    lambda checkpointer: checkpointer.wait(),
    lambda checkpointer: checkpointer.save(3, state_of(3), {}),
    lambda checkpointer: checkpointer.latest_step() == 1 and checkpointer.check(),
])
def test_a_write_that_fails_later_is_an_error_at_the_next_call(one_step, tmp_path, monkeypatch, find):
    monkeypatch.setattr(checkpoint_lib, "seal", full_disk)
    one_step.save(2, state_of(2), {})
    with pytest.raises(CheckpointError, match=MESSAGE):
        find(one_step)
    assert os.listdir(tmp_path) == ["1"] and values(tmp_path) == (1, {1.0})


@pytest.mark.parametrize("ending", [None, hosts.Preempted])
def test_a_write_that_fails_is_an_error_at_the_end(one_step, monkeypatch, ending):
    """A run that was told to stop must not say that it has saved."""
    monkeypatch.setattr(checkpoint_lib, "seal", full_disk)
    with pytest.raises(CheckpointError, match=MESSAGE), one_step:
        one_step.save(2, state_of(2), {})
        if ending:
            raise ending


def test_a_write_that_fails_hides_no_other_error(one_step, monkeypatch):
    monkeypatch.setattr(checkpoint_lib, "seal", full_disk)
    with pytest.raises(FloatingPointError), one_step:
        one_step.save(2, state_of(2), {})
        raise FloatingPointError


def test_what_was_begun_before_an_error_is_saved(one_step, tmp_path, disk):
    arrived, go_on = disk
    with pytest.raises(FloatingPointError), one_step:
        one_step.save(2, state_of(2), {})
        threading.Timer(0.1, go_on.set).start()
        raise FloatingPointError
    assert values(tmp_path) == (2, {2.0})


def test_nothing_of_a_state_stays_in_memory(one_step):
    state = {"weights": jnp.ones(4096)}
    kept = weakref.ref(state["weights"])
    one_step.save(2, state, {})
    one_step.wait()
    del state
    gc.collect()
    assert kept() is None


def test_each_file_is_hashed_by_the_process_that_wrote_it(tmp_path):
    written = {"state/manifest.ocdbt": 0, "record/metadata": 0, "state/ocdbt.process_0/d/a": 0,
               "state/ocdbt.process_1/d/a": 1, "state/ocdbt.process_12/manifest.ocdbt": 12}
    for name in written:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    parts = {process: digests_of(tmp_path, process) for process in (0, 1, 2, 12)}
    assert {name: process for process, part in parts.items() for name in part} == written
    with pytest.raises(RuntimeError, match=r"state/ocdbt\.process_1/d/a is not seen by all processes"):
        seal(tmp_path, 1, parts[0] | parts[12])
    folder = tmp_path.rename(tmp_path.with_name("1"))
    seal(folder, 1, parts[0] | parts[1] | parts[12])
    assert find_damage(folder) is None


TWO_PROCESSES = """
    import json, sys
    import jax, jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from tango_jax.runtime import checkpoint as checkpoint_lib, hosts, sealed

    hosts.connect()
    hashed, sha256 = [], sealed._sha256
    sealed._sha256 = lambda path: hashed.append(str(path).split(".saving/")[-1]) or sha256(path)
    places = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    make = jax.jit(lambda: jnp.arange(1 << 16, dtype=jnp.float32), out_shardings=places)
    update = jax.jit(lambda x: x + jnp.sum(x) * 0 + 1, out_shardings=places, donate_argnums=0)
    state = make()
    for directory in sys.argv[1:]:  # the same steps in each
        with checkpoint_lib.Checkpointer(directory, keep=3) as checkpointer:
            for step in range(3):
                checkpointer.save(step, {"x": state}, {"step": step})
                for _ in range(20):  # collectives of devices, while the other thread's processes wait for each other
                    state = update(state)
                assert hosts.max_over_processes(step) == (step,)
        assert checkpointer.steps() == [0, 1, 2], checkpointer.steps()
    print(json.dumps(sorted(set(hashed))))
"""


def test_two_processes_train_while_each_writes_and_hashes_its_part(tmp_path):
    directories = [tmp_path / name for name in ("generator", "verifier")]
    together = {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}", "JAX_NUM_PROCESSES": "2",
                "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT),
                "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-c", textwrap.dedent(TWO_PROCESSES), *map(str, directories)]
    processes = [
        subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                         env=os.environ | together | {"JAX_PROCESS_ID": str(number)})
        for number in range(2)
    ]
    hashed = []
    for done in [finish(process) for process in processes]:
        assert done.code == 0, done.stderr[-3000:]
        hashed.append(json.loads(done.stdout.splitlines()[-1]))
    assert all("/ocdbt.process_1/" in name for name in hashed[1]) and hashed[1]
    assert not any("/ocdbt.process_1/" in name for name in hashed[0])
    for number, directory in enumerate(directories):
        for step in range(3):
            assert find_damage(directory / str(step)) is None
        start = 60 * number + 40
        restored = checkpoint_lib.read_state(directory, {"x": jax.ShapeDtypeStruct((1 << 16,), np.float32)})
        np.testing.assert_array_equal(restored.state["x"], np.arange(1 << 16) + start)
