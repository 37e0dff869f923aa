"""Reviews, run as ``python -m scripts.review.NAME``; they use the tests' helpers and ``bench``."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2] / name) for name in ("src", "tests", "scripts")]
