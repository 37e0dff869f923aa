"""Parts of ``scripts/bench.py``; their tokenizer is that of the tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
