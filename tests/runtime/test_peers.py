"""The end of one process ends the others, wherever they are."""

import json
import threading
import types

import jax
import pytest

from tango_jax.runtime import peers


class Service:
    """Of one process: what jax's coordination service offers."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key: str, value: str) -> None:
        if key in self.values:
            raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: {key}")
        self.values[key] = value

    def key_value_try_get(self, key: str) -> str:
        if key not in self.values:
            raise jax.errors.JaxRuntimeError(f"NOT_FOUND: {key}")
        return self.values[key]


@pytest.fixture
def service(monkeypatch):
    service = Service()
    monkeypatch.setattr(peers, "distributed", types.SimpleNamespace(global_state=types.SimpleNamespace(client=service)))
    monkeypatch.setattr(peers, "LOOK_S", 0.001)
    return service


def test_what_one_announces_ends_the_other(service, monkeypatch, capsys):
    ended, codes = threading.Event(), []
    monkeypatch.setattr(peers.os, "_exit", lambda code: codes.append(code) or ended.set() or over.set())
    over = threading.Event()
    watcher = threading.Thread(target=peers._watch, args=(service, over))
    watcher.start()
    assert not ended.wait(0.05)
    peers.announce("error: no memory", 1)
    assert ended.wait(60)
    watcher.join(60)
    assert codes == [1] and capsys.readouterr().err == "error: no memory (in process 0 of 1)\n"
    peers.announce("error: another", 2)  # the first one counts
    assert json.loads(service.values["tango_jax/ended"])[0].startswith("error: no memory")


def test_nobody_is_ended_after_the_work_or_without_other_processes(service, monkeypatch):
    monkeypatch.setattr(peers.os, "_exit", lambda code: pytest.fail("ended"))
    before = threading.active_count()
    with peers.ends_with_others():
        [thread] = [thread for thread in threading.enumerate() if thread.name == "peers"]
    thread.join(60)
    assert not thread.is_alive()
    peers.announce("error: late", 1)
    peers.distributed.global_state.client = None
    with peers.ends_with_others():
        assert threading.active_count() == before
    peers.announce("error: alone", 1)


def test_a_service_that_is_gone_ends_the_watch(service, monkeypatch):
    asked = []

    def gone(key):
        asked.append(key)
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: connection refused")

    service.key_value_try_get = gone
    peers._watch(service, threading.Event())
    assert len(asked) == 1
