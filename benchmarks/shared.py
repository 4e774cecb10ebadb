"""What the benchmarks share with the tests: the table of cases and the reference."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))

from cases import BENCH_CELLS, BENCH_GROUPS, Case, cache_groups
from reference import attention

__all__ = ["BENCH_CELLS", "BENCH_GROUPS", "ROOT", "Case", "attention", "cache_groups"]
