"""The schedule of continuous batching, without a model: by hand, its invariants at random, and what it wastes."""

import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tango_jax.sampling import schedule
from tango_jax.sampling.buckets import SamplerConfig
from tango_jax.sampling.schedule import (
    NONE,
    Decode,
    Insert,
    Read,
    Resize,
    Restore,
    Save,
    Seat,
    Segment,
    Shape,
    limits_of,
    new_table,
    next_action,
    replay,
)


def followed(config, group_size, prompts, lengths):
    """(actions, segments, row-steps): the schedule of rows of these lengths on a device that is played token by token,
    with everything checked that must hold in between."""
    limits, lengths = limits_of(config, group_size), np.asarray(lengths)
    prompt_B, shards, table = np.repeat(prompts, group_size), config.row_multiple, new_table(limits, prompts)
    # {(shard, slot): row}, and so on. `has`: tokens on the device, of which the table learns after a loop.
    slots, host, held, has = {}, set(), set(), np.zeros(len(lengths), int)
    shape, actions, segments, row_steps = None, [], [], len(lengths)
    while (action := next_action(limits, table)) is not None:
        actions.append(action)
        table = schedule.apply(limits, table, action)
        match action:
            case Resize(new, slot_ZR):
                assert new in config.shapes and new.rows // shards * new.columns <= config.cache_tokens
                if shape is not None:
                    assert config.shapes.index(new) > config.shapes.index(shape)
                    moved = {(z, i): slots.get((z, int(s))) for z, row in enumerate(slot_ZR) for i, s in enumerate(row)}
                    moved = {place: row for place, row in moved.items() if row is not None}
                    assert sorted(moved.values()) == sorted(slots.values())  # nobody is lost, nobody is doubled
                    slots = moved
                shape = new
            case Save(seats):
                for row, shard, slot in seats:
                    assert slots.pop((shard, slot)) == row and table.length_B[row] == has[row]
                    host.add(row)
            case Restore(seats):
                for row, shard, slot in seats:
                    host.remove(row)
                    assert (shard, slot) not in slots and 0 <= slot < shape.rows // shards
                    assert prompt_B[row] + has[row] <= shape.columns
                    slots[shard, slot] = row
            case Read(prompt_ZQ):
                held = {(z, int(p)) for z, prompts in enumerate(prompt_ZQ) for p in prompts if p != NONE}
                assert len(held) == (prompt_ZQ != NONE).sum() and prompt_ZQ.size == limits.chunk_prompts
            case Insert(seats):
                for row, shard, slot in seats:
                    assert has[row] == 0 and (shard, row // group_size) in held and prompt_B[row] < shape.columns
                    assert (shard, slot) not in slots and 0 <= slot < shape.rows // shards
                    slots[shard, slot], has[row] = row, 1
            case Decode(min_alive):
                assert 0 <= min_alive < len(slots) and len(set(slots.values())) == len(slots)
                before, alive, steps = len(slots), {row for row in slots.values() if has[row] < lengths[row]}, 0
                while len(alive) > min_alive and all(prompt_B[row] + has[row] <= shape.columns for row in alive):
                    for row in alive:
                        has[row] += 1
                    alive = {row for row in alive if has[row] < lengths[row]}
                    steps += 1
                slots = {place: row for place, row in slots.items() if row in alive}
                assert steps > 0 or len(slots) < before
                segments += [Segment(shape, steps)] if steps else []
                row_steps += steps * shape.rows
                table = schedule.advance(table, has.copy(), has == lengths)
        expected = np.full_like(table.row_ZR, NONE)
        for place, row in slots.items():
            expected[place] = row
        np.testing.assert_array_equal(table.row_ZR, expected)
    assert not slots and not host
    np.testing.assert_array_equal(has, lengths)
    return actions, segments, row_steps


def test_by_hand():
    # Room for 4 rows of 4 tokens or 2 of 8. Four prompts of two tokens and one row each.
    config = SamplerConfig((2,), (3, 6), (1, 2, 3, 4), cache_tokens=16)
    assert config.shapes == (Shape(4, 4), Shape(2, 8), Shape(1, 8))
    actions, segments, row_steps = followed(config, 1, [2] * 5, [1, 6, 4, 5, 3])
    shown = [
        action._replace(slot_ZR=action.slot_ZR.tolist()) if isinstance(action, Resize)
        else action.prompt_ZQ.tolist() if isinstance(action, Read) else action
        for action in actions
    ]
    assert shown == [
        Resize(Shape(4, 4), [[]]),
        [[0]], Insert((Seat(0, 0, 0),)),  # one prompt is read at a time
        [[1]], Insert((Seat(1, 0, 1),)),
        [[2]], Insert((Seat(2, 0, 2),)),
        [[3]], Insert((Seat(3, 0, 3),)),
        Decode(3),
        # Row 0 has ended with its first token, so that three run, and no step is made.
        [[4]], Insert((Seat(4, 0, 0),)),
        Decode(1),
        # After two steps all have three tokens: row 4 has ended, the others fill their slots. Two of them go on with
        # eight columns: all have come equally far, and the first leaves.
        Save((Seat(1, 0, 1),)),
        Resize(Shape(2, 8), [[2, 3]]),
        Decode(1),
        # Row 2 has its fourth token and ends.
        Restore((Seat(1, 0, 0),)),
        Decode(1),
        # A step later row 3 has ended, and row 1 has four of its six tokens.
        Resize(Shape(1, 8), [[0]]),
        Decode(0),
    ]
    assert segments == [(Shape(4, 4), 2), (Shape(2, 8), 1), (Shape(2, 8), 1), (Shape(1, 8), 2)]
    assert row_steps == 5 + 8 + 2 + 2 + 2 == replay(limits_of(config, 1), [2] * 5, [1, 6, 4, 5, 3]).row_steps


def test_a_slot_is_refilled_when_its_row_ends():
    config = SamplerConfig((2,), (8,), (2,), cache_tokens=20)
    actions, segments, row_steps = followed(config, 1, [2] * 4, [8, 3, 3, 3])
    assert [action.seats for action in actions if isinstance(action, Insert)] == [
        (Seat(0, 0, 0),), (Seat(1, 0, 1),), (Seat(2, 0, 1),), (Seat(3, 0, 1),)
    ]
    assert [steps for _, steps in segments] == [2, 2, 3]


def test_samples_of_a_prompt_that_is_read_once_wait_for_slots():
    config = SamplerConfig((2,), (8,), (2,), cache_tokens=20)
    actions, _, _ = followed(config, 4, [2], [8, 3, 3, 3])
    assert [type(action) for action in actions[:2]] == [Resize, Read]
    assert sum(isinstance(action, Read) for action in actions) == 1
    assert [action.seats for action in actions if isinstance(action, Insert)] == [
        (Seat(0, 0, 0), Seat(1, 0, 1)), (Seat(2, 0, 1),), (Seat(3, 0, 1),)
    ]


def test_a_long_prompt_waits_for_a_larger_slot():
    config = SamplerConfig((2, 6), (2, 6), (1, 2, 4), cache_tokens=24)
    assert config.shapes == (Shape(4, 4), Shape(2, 12), Shape(1, 12))
    actions, segments, _ = followed(config, 1, [6, 2, 2, 2, 2], [3, 2, 2, 2, 2])
    assert [int(action.prompt_ZQ[0, 0]) for action in actions if isinstance(action, Read)] == [1, 2, 3, 4, 0]
    assert [shape for shape, _ in segments] == [Shape(4, 4), Shape(1, 12)]


@settings(deadline=None, max_examples=200, derandomize=True)
@given(data=st.data())
def test_every_row_is_sampled_to_its_end_within_the_budget(data):
    draw = data.draw
    cache_buckets = tuple(sorted(draw(st.sets(st.integers(1, 40), min_size=1, max_size=4))))
    row_buckets = tuple(sorted(draw(st.sets(st.integers(1, 40), min_size=1, max_size=5))))
    longest, shards = draw(st.integers(1, 20)), draw(st.sampled_from((1, 1, 2, 3)))
    config = SamplerConfig((longest,), cache_buckets, row_buckets).with_row_multiple(shards)
    least = config.row_buckets[0] // shards * (longest + cache_buckets[-1])
    most = config.row_buckets[-1] // shards * (longest + cache_buckets[-1])
    config = SamplerConfig(
        (longest,), cache_buckets, config.row_buckets, draw(st.integers(least, most)), shards
    )
    config.check_cache_tokens()
    group_size = draw(st.integers(1, 6))
    prompts = draw(st.lists(st.integers(1, longest), min_size=1, max_size=20))
    size = len(prompts) * group_size
    lengths = draw(st.lists(st.integers(1, cache_buckets[-1]), min_size=size, max_size=size))
    actions, segments, row_steps = followed(config, group_size, prompts, lengths)
    done = replay(limits_of(config, group_size), prompts, lengths)
    assert list(done.segments) == segments and done.row_steps == row_steps
    reads = [action.prompt_ZQ for action in actions if isinstance(action, Read)]
    assert list(done.chunks) == [prompt_ZQ[prompt_ZQ >= 0].min() for prompt_ZQ in reads]
    assert done.saved == sum(len(action.seats) for action in actions if isinstance(action, Save))
    assert done.decode_steps == len(done.chunks) + sum(steps for _, steps in segments)


def math_lengths(count, longest, seed):
    """Log-normal, as responses to math problems are: mean a quarter of the longest, 1 % cut off at it, no order."""
    normal = statistics.NormalDist()
    z = np.array([normal.inv_cdf((i + 0.5) / count) for i in range(count)])
    low, high = 1.0, float(longest)
    for _ in range(50):
        scale = (low + high) / 2
        lengths = np.clip(np.round(scale * np.exp(0.9 * z)), 1, longest)
        low, high = (scale, high) if lengths.mean() < longest / 4 else (low, scale)
    assert lengths.max() == longest and abs(lengths.mean() / longest - 0.25) < 0.01
    return np.random.default_rng(seed).permutation(lengths.astype(int))


LADDER = tuple(sorted({max(1, round(512 * 0.85**i)) for i in range(40)}))


@pytest.mark.parametrize(
    "count, group_size, longest, cache_buckets, cache_tokens",
    [
        (1280, 5, 2048, (256, 512, 1024, 2048), 160_000),
        (1024, 16, 4096, (512, 1024, 2048, 4096), 300_000),
        (1024, 1, 4096, (256, 512, 1024, 2048, 4096), 500_000),
        (512, 8, 1024, (1024,), 100_000),
    ],
)
def test_lengths_of_math_responses_waste_less_than_a_tenth(count, group_size, longest, cache_buckets, cache_tokens):
    config = SamplerConfig((256,), cache_buckets, LADDER, cache_tokens)
    for seed in range(3):
        lengths = math_lengths(count, longest, seed)
        done = replay(limits_of(config, group_size), [256] * (count // group_size), lengths)
        print(f"{done.row_steps / lengths.sum():.3f} row-steps a token, {done.decode_steps} steps, {done.saved} saved")
        assert lengths.sum() <= done.row_steps <= 1.1 * lengths.sum()
        # All rows at their longest fit so many at a time: their batches, each to its end.
        plain = [rows for rows in LADDER if rows * (256 + longest) <= cache_tokens][-1]
        batches = [lengths[i : i + plain].max() for i in range(0, count, plain)]
        assert done.decode_steps < 0.75 * sum(batches)


def test_a_budget_that_holds_no_batch_is_refused():
    config = SamplerConfig((8, 16), (4, 16), (3, 6), cache_tokens=95)
    with pytest.raises(ValueError, match=r"=95 .* 3 rows on a device of up to 32 tokens.* are 96; raise it"):
        config.check_cache_tokens()
    config.with_row_multiple(2).check_cache_tokens()  # two rows on each of two devices
    SamplerConfig((8, 16), (4, 16), (3, 6), cache_tokens=96).check_cache_tokens()
    SamplerConfig((8, 16), (4, 16), (3, 6)).check_cache_tokens()


def test_rows_within_a_budget():
    config = SamplerConfig((8,), (8, 24), (2, 3, 4, 8), cache_tokens=64)
    assert config.rows_within(16) == (2, 3, 4) and config.rows_within(32) == (2,)
    assert config.shapes == (Shape(4, 11), Shape(2, 32))
    # In proportion 1366 and 2731, and 193 and 206.
    assert SamplerConfig((2560,), (512, 1024, 1536), (8,), 32768).columns == (1408, 2816, 4096)
    assert SamplerConfig((2561,), (512, 1024, 1536), (8,), 32776).columns == (1366, 2732, 4097)
    assert SamplerConfig((64,), (150, 160, 224), (8,), 2304).columns == (208, 288)
    on_two = config.with_row_multiple(2)
    assert on_two.row_buckets == (2, 4, 8)
    assert on_two.rows_within(16) == (2, 4, 8) and on_two.rows_within(32) == (2, 4)
    assert on_two.shapes == (Shape(8, 11), Shape(4, 32), Shape(2, 32))
