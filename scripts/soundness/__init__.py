"""Checks of soundness, run as ``python -m scripts.soundness.NAME``; they use the tests' helpers."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2] / name) for name in ("src", "tests", "scripts")]
