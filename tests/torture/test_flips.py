"""A few of the torture suite's flipped bytes, and a check that it would see one that goes unnoticed."""

from tango_jax.runtime import sealed
from torture.flips import flips, make_steps


def test_no_flipped_byte_goes_unnoticed(tmp_path):
    make_steps(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    done = flips(count=12, seed=1, folder=tmp_path)
    assert (done.tried, done.survived, done.failures) == (12, 12, [])
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_flips_that_are_not_seen_are_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(sealed, "find_damage", lambda folder: None)
    done = flips(count=2, folder=tmp_path)
    assert (done.survived, len(done.failures)) == (0, 2)
    assert "seed 0, flip 0: byte" in done.failures[0] and "manifest.sha256" in done.failures[0]
