"""What surrounds a command's work: settings of the process before it, one clear message after a failure."""

import contextlib
import gc
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import jax
from ml_collections import ConfigDict

from tango_jax.runtime import failures, hosts, peers, termination
from tango_jax.runtime.console import Console
from tango_jax.runtime.model_text import on_one_line
from tango_jax.runtime.process import set_allocator, use_compile_cache


def configure(config: ConfigDict) -> str:
    """Call before the first array is made. Returns a warning, or "". Raises ValueError, see hosts.connect."""
    gc.set_threshold(50_000, 10, 10)  # tracing makes many objects and little garbage
    hosts.connect()
    hosts.check_devices()
    if jax.default_backend() == "cpu":
        if hosts.is_alone() and "TF_CPP_MIN_LOG_LEVEL" not in os.environ:
            # XLA reports a compilation of two minutes, as on a busy machine, as a bug. Errors still raise.
            jax.config.update("jax_logging_level", "CRITICAL")
        # A published model's step takes seconds: page faults matter little, memory matters.
        set_allocator(keeps_freed_memory=not (config.generator.checkpoint or config.verifier.checkpoint))
    return use_compile_cache(config.compile_cache) if config.compile_cache else ""


@contextlib.contextmanager
def _one_cache_warning(console: Console) -> Iterator[None]:
    """jax warns of each program that it could not cache; one warning is enough."""
    show, first = warnings.showwarning, []

    def show_once(message, category, *place, **options):
        text = str(message)
        if "persistent compilation cache entry" not in text:
            show(message, category, *place, **options)
        elif not first:
            first.append(text)
            console.log(f"warning: the compile cache fails; this costs only time ({text.splitlines()[0]})")

    with warnings.catch_warnings():
        warnings.showwarning = show_once
        yield


@contextlib.contextmanager
def configured(config: ConfigDict, console: Console | None = None) -> Iterator[Console]:
    """Call `configure`, log its warning, and yield `console`, or one that prints in the first process."""
    warning = configure(config)
    console = console or Console(enabled=hosts.is_first())
    if warning:
        console.log(warning)
    with _one_cache_warning(console), console.heartbeat():
        yield console


# These say what to do.
MESSAGES_WITH_ADVICE = (ValueError, FloatingPointError, failures.OutOfMemory)


@contextlib.contextmanager
def session(config: ConfigDict, workdir: Path) -> Iterator[Console]:
    """Around the work of a command that resumes. A bug keeps its traceback.

    Other failures end in one line with a code of failures.py; hosts.PREEMPTED and hosts.PEER_LOST mean: start again.
    """
    console = Console(enabled=False)
    termination.watch()
    termination.end_with_parent()
    try:
        with configured(config) as console, peers.ends_with_others():
            termination.watch(is_silent=not hosts.is_first())  # joining other processes takes the signal's handler
            yield console
    except KeyboardInterrupt:
        then = (f"; the same command resumes from what is saved in {workdir}" if workdir.is_dir()
                else " before anything was saved; run the same command again")
        _leave(f"interrupted{then}", failures.INTERRUPTED)
    except hosts.Preempted:
        if termination.is_interrupted():
            _leave(f"interrupted: saved; the same command resumes in {workdir}", failures.INTERRUPTED)
        console.log(f"told to stop (SIGTERM): saved; the same command resumes in {workdir}")
        sys.exit(hosts.PREEMPTED)
    except Exception as error:
        if not hosts.is_alone() and _is_lost_peer(error):
            _leave(_describe_lost_peer(error, console.doing, workdir), hosts.PEER_LOST)
        if not failures.is_bug(error):
            is_open = workdir.is_dir() and not isinstance(error, MESSAGES_WITH_ADVICE)
            then = f". What is saved in {workdir} is kept: the same command resumes from there" if is_open else ""
            _leave(f"{failures.last_line(error)}{then}", failures.exit_code(error))
        if hosts.is_alone():
            raise
        traceback.print_exc()
        _leave(f"error: in process {jax.process_index()} of {jax.process_count()}, see above", failures.FAILED)
    finally:
        termination.leave_interrupts()


def _describe_lost_peer(error: Exception, doing: str, workdir: Path) -> str:
    place = [frame for frame in traceback.extract_tb(error.__traceback__) if "tango_jax" in frame.filename][-1]
    first_line = str(error).splitlines()[0]
    return (f"error: process {jax.process_index()} of {jax.process_count()} lost another process during "
            f"{doing or 'the start'} ({place.name}): {first_line}. Start all processes again; "
            f"the run resumes from the last checkpoint in {workdir}")


def _is_lost_peer(error: Exception) -> bool:
    """Whether another process may have caused the error by ending; then a restart helps."""
    own = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT")
    return isinstance(error, jax.errors.JaxRuntimeError) and not str(error).startswith(own)


def _leave(message: str, code: int) -> NoReturn:
    """Among several processes, ends at once: an orderly end would wait for the others, which wait for this one."""
    message = "\n".join(map(on_one_line, message.split("\n")))
    if hosts.is_alone():
        failures.leave(message, code)
    failures.drop_broken_output()
    print(message, file=sys.stderr, flush=True)
    if code in (failures.FAILED, failures.MISTAKE):
        peers.announce(message, code)
    os._exit(code)
