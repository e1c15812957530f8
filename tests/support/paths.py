"""Where the checkout and the files of the tests are."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"
CONFIGS = ROOT / "configs"
TESTS = ROOT / "tests"
FIXTURES = TESTS / "fixtures"
ROWS = FIXTURES / "rows"
