"""Collectives read from HLO text: every form of it that XLA's backends print, with bytes worked by hand."""
import pytest

from support.hlo import collectives, gathers_beside_products, group_size, shape_bytes, wire_bytes_by_kind
from tango_jax.planning.traffic import ring_bytes

# A loop over micro-batches (its limit is data), in it a scan of 28 and one of 3 that only its condition tells.
PROGRAM = """HloModule jit_update, is_scheduled=true

%layer (p.0: (s32[], bf16[16,64])) -> (s32[], bf16[16,64]) {
  %p.0 = (s32[], bf16[16,64]{1,0}) parameter(0)
  %all-gather-start.1 = (bf16[16,64]{1,0}, bf16[128,64]{1,0}) all-gather-start(%p.1), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
  %all-gather-done.1 = bf16[128,64]{1,0} all-gather-done(%all-gather-start.1)
  %all-reduce.9 = f32[512]{0} all-reduce(%p.2), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%sum
  ROOT %t.1 = (s32[], bf16[16,64]{1,0}) tuple(%p.0)
}

%layer_end (p.3: (s32[], bf16[16,64])) -> pred[] {
  %p.3 = (s32[], bf16[16,64]{1,0}) parameter(0)
  ROOT %lt.1 = pred[] compare(%g.1, %c.1), direction=LT
}

%chunk (p.4: (s32[])) -> (s32[]) {
  %fusion.1 = f32[2]{0} fusion(%p.4), kind=kLoop, calls=%scattered
}

%scattered (p.5: f32[64,4]) -> f32[8,4] {
  ROOT %reduce-scatter.2 = f32[8,4]{1,0:T(8,128)(2,1)} reduce-scatter(%p.5), replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%sum
}

%chunk_end (p.6: (s32[])) -> pred[] {
  %constant.3 = s32[]{:T(128)} constant(3), metadata={op_name="x"}
  ROOT %lt.2 = pred[]{:T(512)} compare(%g.2, %constant.3), direction=LT
}

%micro (p.7: (s32[])) -> (s32[]) {
  %while.1 = (s32[], bf16[16,64]{1,0}) while(%t.2), condition=%layer_end, body=%layer, backend_config={"known_trip_count":{"n":"28"},"known_init_step":{"init":"0","step":"1"}}
  %while.2 = (s32[]) while(%t.3), condition=%chunk_end, body=%chunk
  %all-reduce-start.5 = (f32[16,64]{1,0}, f32[10]{0}) all-reduce-start(%a, %b), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%sum
}

%micro_end (p.8: (s32[])) -> pred[] {
  ROOT %lt.3 = pred[] compare(%g.3, %g.4), direction=LT
}

ENTRY %main.1 (x: f32[4]) -> f32[4] {
  %while.3 = (s32[]) while(%t.4), condition=%micro_end, body=%micro
  ROOT %collective-permute-start.1 = (f32[4]{0}, f32[4]{0}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
}
"""  # noqa: E501


def test_loops_multiply_and_lone_devices_do_not_count():
    found = {item.kind: item for item in collectives(PROGRAM, 8)}
    assert set(found) == {"all-gather", "reduce-scatter", "all-reduce", "collective-permute"}
    gather = found["all-gather"]
    assert (gather.size, gather.members, gather.times, gather.in_pass) == (128 * 64 * 2, tuple(range(8)), 28, True)
    scatter = found["reduce-scatter"]  # inside a fusion; 8 parts of 8 x 4 floats
    assert (scatter.size, scatter.times, scatter.in_pass) == (8 * 8 * 4 * 4, 3, True)
    total = found["all-reduce"]
    assert (total.size, total.members, total.times) == ((16 * 64 + 10) * 4, (0, 1), 1)
    assert (found["collective-permute"].size, found["collective-permute"].in_pass) == (16, False)


def test_bytes_that_a_device_receives():
    assert ring_bytes("all-gather", 800, 8) == ring_bytes("reduce-scatter", 800, 8) == 700
    assert ring_bytes("all-reduce", 800, 8) == 1400
    found = collectives(PROGRAM, 8)
    assert wire_bytes_by_kind(found, passes=5) == {
        "all-gather": 5 * 28 * 16384 * 7 / 8,
        "reduce-scatter": 5 * 3 * 1024 * 7 / 8,
        "all-reduce": 5 * 2 * 4136 / 2,
        "collective-permute": 16.0,
    }


def test_gathers_that_products_run_beside():
    """The gather of a layer ends before any product; with one in between, in a fusion, it does not. A synchronous one
    waits, and outside of loops of known length nothing counts."""
    assert gathers_beside_products(PROGRAM) == (0, 1)
    fused = "  %fusion.7 = f32[2]{0} fusion(%p.1), kind=kCustom, calls=%product\n"
    product = "%product (p.9: f32[4]) -> f32[4] {\n  ROOT %dot.1 = f32[4] dot(%p.9, %p.9)\n}\n\n"
    done = "  %all-gather-done.1"
    beside = PROGRAM.replace(done, fused + done).replace("%layer (", product + "%layer (", 1)
    assert gathers_beside_products(beside) == (1, 1)
    waiting = "  %all-gather.2 = bf16[128,64]{1,0} all-gather(%p.1), replica_groups={{0,1}}, dimensions={0}\n"
    assert gathers_beside_products(beside.replace(done, waiting + done)) == (1, 2)
    after = PROGRAM.replace("  %all-reduce.9", fused + "  %all-reduce.9").replace("%layer (", product + "%layer (", 1)
    assert gathers_beside_products(after) == (0, 1)


def test_a_loop_of_unknown_length_inside_another_one_is_refused():
    with pytest.raises(AssertionError, match="in a loop of unknown length inside another"):
        collectives(PROGRAM.replace("constant(3)", "parameter(1)"), 8)


@pytest.mark.parametrize("text, size", [
    ("replica_groups={{0,2},{1,3}}, dimensions={0}", 2), ("replica_groups={{0},{1}}, to_apply=%sum", 1),
    ("replica_groups=[2,4]<=[8], dimensions={0}", 4), ("replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}", 2),
    ("replica_groups=mesh['a'=2,'b'=4] {'b'}, dimensions={0}", 4),
    ("replica_groups=mesh['a'=2,'b'=4] {'a'}, dimensions={0}", 2),
    ("replica_groups=mesh['a'=1,'b'=4,'c'=2] {'a','b'}", 4),
    ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}, dim", 4),
    ("replica_groups={}, dimensions={0}", 8),
])
def test_groups(text, size):
    assert group_size(text, 8) == size


@pytest.mark.parametrize("shape, size", [
    ("f32[]", 4), ("bf16[3,5]{1,0:T(8,128)(2,1)}", 30), ("(f32[2]{0}, /*index=1*/s8[7]{0}, pred[3])", 18),
    ("f8e4m3fn[10]{0}", 10), ("u64[2,2]{1,0:T(8,128)S(6)}", 32),
])
def test_sizes_of_shapes(shape, size):
    assert shape_bytes(shape) == size
