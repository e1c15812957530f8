"""Checkpoints in processes of their own that run out of disk or are killed in the middle of a save."""

import json
import os
import subprocess
import sys
import textwrap

import jax
import numpy as np

from support.paths import ROOT
from support.processes import HANG_S
from tango_jax.runtime.checkpoint import Checkpointer


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess:
    """A fresh process: limits on file size and kill signals must not reach the test runner."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code), *arguments], env=environment, timeout=HANG_S,
                          capture_output=True, text=True, check=False)


FULL_DISK = """
    import json, resource, signal, sys
    import numpy as np, jax
    from tango_jax.runtime.checkpoint import Checkpointer, CheckpointError

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    checkpointer = Checkpointer(sys.argv[1])
    checkpointer.save(1, {"w": np.ones(3, np.float32)}, {})
    checkpointer.wait()
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, unlimited[1]))
    noise = {"w": np.random.default_rng(0).normal(size=200_000).astype(np.float32)}
    try:
        checkpointer.save(2, noise, {})
        checkpointer.wait()
    except CheckpointError as error:
        print(json.dumps([str(error), checkpointer.steps()]))
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    checkpointer.save(2, noise, {})
    checkpointer.wait()
"""


def test_failed_write_names_the_directory_and_keeps_the_last_step(tmp_path):
    done = run_python(FULL_DISK, str(tmp_path))
    assert done.returncode == 0, done.stderr
    message, steps = json.loads(done.stdout)
    assert steps == [1]
    for part in (str(tmp_path), "GiB free", "step 2", "File too large", "the last good checkpoint (step 1) is kept"):
        assert part in message
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


NO_FOLDERS = """
    import errno, json, os, sys, threading
    import numpy as np
    from tango_jax.runtime.checkpoint import Checkpointer, CheckpointError

    checkpointer = Checkpointer(sys.argv[1])
    make = os.mkdir

    def mkdir(path, *arguments, **options):
        if "-tmp/" in str(path):  # the folders in that of a step, whose threads wait for them
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        make(path, *arguments, **options)

    os.mkdir = mkdir
    try:
        checkpointer.save(1, {"w": np.ones(3, np.float32)}, {})
    except CheckpointError as error:
        alive = [thread.name for thread in threading.enumerate() if not thread.daemon]
        print(json.dumps([str(error), alive]))
"""


def test_a_process_whose_save_failed_can_end(tmp_path):
    """Threads of Orbax wait ten minutes for what the failed save would have made; the process must not."""
    done = run_python(NO_FOLDERS, str(tmp_path))
    assert done.returncode == 0, done.stderr
    message, alive = json.loads(done.stdout)
    assert "No space left on device" in message and alive == ["MainThread"]


KILLED = """
    import os, signal, sys
    import numpy as np
    from tango_jax.runtime import checkpoint as checkpoint_lib

    checkpointer = checkpoint_lib.Checkpointer(sys.argv[1])
    checkpointer.save(1, {"w": np.full(3, 1, np.float32)}, {})
    checkpointer.wait()
    checkpoint_lib.seal = lambda folder, step, digests: os.kill(os.getpid(), signal.SIGKILL)
    checkpointer.save(2, {"w": np.full(3, 2, np.float32)}, {})
    checkpointer.wait()
"""


def test_resume_after_kill_9_inside_a_save(tmp_path):
    assert run_python(KILLED, str(tmp_path)).returncode == -9
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2.saving"]
    checkpointer = Checkpointer(tmp_path)
    restored = checkpointer.restore({"w": jax.ShapeDtypeStruct((3,), np.float32)})
    assert restored.step == 1 and restored.state["w"].tolist() == [1, 1, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1"]
