"""How much memory there is: of the machine, of a container, of a device."""

import jax

from tango_jax.runtime import machine


def test_a_container_has_less_than_its_machine(tmp_path, monkeypatch):
    whole = machine.host_memory()
    assert whole > 2**28
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(machine, "CONTAINER_LIMITS", (str(tmp_path / "none"), str(limit)))
    limit.write_text("1073741824\n")
    assert machine.host_memory() == 2**30
    limit.write_text("max\n")
    assert machine.host_memory() >= whole


def test_devices_of_a_cpu_share_its_memory(monkeypatch):
    monkeypatch.setattr(machine, "host_memory", lambda: 800)
    assert machine.device_memory() == 800 // len(jax.local_devices())


def test_an_accelerator_says_itself_what_programs_may_use(monkeypatch):
    class Device:
        platform = "gpu"

        def memory_stats(self):
            return {"bytes_limit": 123}

    monkeypatch.setattr(jax, "local_devices", lambda: [Device(), Device()])
    assert machine.device_memory() == 123


def test_what_is_prepared_is_handed_over_and_not_timed(monkeypatch):
    now, seen = [0.0], []

    def prepare_fn(i):
        now[0] += 100
        return 10 * i

    def fn(argument):
        seen.append(argument)
        now[0] += argument

    monkeypatch.setattr(machine.time, "perf_counter", lambda: now[0])
    assert machine.median_seconds(fn, 3, prepare_fn) == 30  # of 20, 30 and 40, after two that do not count
    assert seen == [0, 10, 20, 30, 40]
