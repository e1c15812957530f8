"""Seconds of phases add up, and compilations after the warm-up are seen."""

import jax
import numpy as np
import pytest

from tango_jax.runtime import timers
from tango_jax.runtime.timers import CompileCounter, PhaseTimer


def test_compile_counter_sees_new_shapes_only():
    @jax.jit
    def double_it(x):
        return x + x

    with CompileCounter() as counter:
        double_it(np.ones(3))
        assert (len(counter.compilations), counter.late()) == (1, [])
        counter.mark_warm()
        double_it(np.zeros(3))
        assert counter.late() == []
        double_it(np.ones(5))
        assert len(counter.compilations) == 2
        [late] = counter.late()
        assert "double_it" in late
    double_it(np.ones(7))
    assert len(counter.compilations) == 2


def test_compile_counter_counts_hits_of_the_persistent_cache(tmp_path):
    names = ["jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"]
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update(names[0], str(tmp_path))
    jax.config.update(names[1], 0.0)
    jax.experimental.compilation_cache.compilation_cache.reset_cache()
    hits = []

    def note_hit(event, **details):
        hits.append(event) if event == "/jax/compilation_cache/cache_hits" else None

    jax.monitoring.register_event_listener(note_hit)
    try:
        with CompileCounter() as counter:
            jax.jit(lambda x: x * 3)(np.ones(3))
            jax.clear_caches()
            jax.jit(lambda x: x * 3)(np.ones(3))
        assert (len(counter.compilations), len(hits)) == (2, 1)
    finally:
        jax.monitoring.unregister_event_listener(note_hit)
        for name, value in before.items():
            jax.config.update(name, value)
        jax.experimental.compilation_cache.compilation_cache.reset_cache()


def test_phase_timer_adds_up_and_starts_again(monkeypatch):
    ticks = iter([0.0, 2.0, 10.0, 10.5, 20.0, 21.0])
    monkeypatch.setattr(timers.time, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr(timers, "memory_gib", lambda: {"host": 1.5})
    timer = PhaseTimer()
    with timer("sample"):
        pass
    with pytest.raises(KeyError), timer("grade"):
        raise KeyError
    with timer("sample"):
        pass
    memory = {"memory/sample_host_gib": 1.5, "memory/grade_host_gib": 1.5}
    assert timer.pop() == {"time/sample_s": 3.0, "time/grade_s": 0.5} | memory
    assert timer.pop() == {}
