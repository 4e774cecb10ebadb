"""Scores of a result against peers measured in the same run, or against an earlier result.

python benchmarks/compare.py NEW.json                        against every peer of the same run
python benchmarks/compare.py NEW.json --peer sdpa_flash      against one of them
python benchmarks/compare.py NEW.json OLD.json               ours now against ours then (add --peer for a peer of OLD)
python benchmarks/compare.py NEW.json --targets              the scores that this package is to reach, and which it does

With --min-mean and --min-worst the exit status is 1 when a score is lower, with --targets when one is missed or was not
measured.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean

sys.path.insert(0, str(Path(__file__).resolve().parent))  # absent under PYTHONSAFEPATH

from scores import environment_line, judged_pairs, load, modes, ratios, score_line


@dataclass(frozen=True)
class Target:
    """The least geometric mean and the least single ratio of the speed of `name` relative to `peer`."""

    group: str
    mode: str
    peer: str
    mean: float = 0.0
    worst: float = 0.0
    name: str = "ours"

    def judge(self, new, old, rows=False):
        """(text, whether it is met); None instead of a verdict where nothing was measured. rows: with every ratio."""
        title = f"{self.group} {self.mode}, {self.name} vs {self.peer}" + (
            " of the old result" if old is not new else ""
        )
        least = [f"{key} >= {value:g}" for key, value in (("mean", self.mean), ("worst", self.worst)) if value]
        wanted = f" ({', '.join(least)})" if least else ""
        found = ratios(new, old, self.peer, self.mode, self.group, self.name)
        if not found:
            return f"unknown {title}: not measured{wanted}", None
        values = [ratio for _, ratio in found]
        met = geometric_mean(values) >= self.mean and min(values) >= self.worst
        verdict = f"{'met' if met else 'missed':<7} " if least else ""
        every = [f"{label:<44} {ratio:.3f}x" for label, ratio in found] if rows else []
        return "\n".join([*every, f"{verdict}{score_line(found, title)}{wanted}"]), met


TARGETS = (
    *(Target("cells", mode, "sdpa_flash", mean=1.0, worst=0.95) for mode in ("fwd", "bwd", "fwd+bwd")),
    *(Target("gqa", mode, "sdpa_flash", worst=1.2) for mode in ("bwd", "fwd+bwd")),
    *(Target("cells", mode, "triton", worst=1.0) for mode in ("fwd", "bwd", "fwd+bwd")),
    Target("deterministic", "bwd", "ours", mean=0.8, name="ours_deterministic"),
)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("new")
    parser.add_argument("old", nargs="?")
    parser.add_argument("--peer", help="the implementation that ours is judged against")
    parser.add_argument("--group", default="cells", help="the group of rows, or all")
    parser.add_argument("--min-mean", type=float, default=0.0, help="least geometric mean")
    parser.add_argument("--min-worst", type=float, default=0.0, help="least single ratio")
    parser.add_argument("--targets", action="store_true", help="judge the scores that this package is to reach")
    parser.add_argument("--rows", action="store_true", help="print every row's ratio")
    options = parser.parse_args(arguments)
    new = load(options.new)
    old = load(options.old) if options.old else new
    one = options.peer or (options.old and "ours")
    pairs = [("ours", one)] if one else judged_pairs(new)
    groups = new["groups"] if options.group == "all" else [options.group]
    asked = [
        Target(group, mode, peer, options.min_mean, options.min_worst, name)
        for mode, group, (name, peer) in itertools.product(modes(new), groups, pairs)
    ]
    judged = [target.judge(new, old, options.rows) for target in (TARGETS if options.targets else asked)]
    shown = [(line, met) for line, met in judged if options.targets or met is not None]
    print(f"new: {environment_line(new)}" + (f"\nold: {environment_line(old)}" if options.old else ""))
    print("\n".join(line for line, _ in shown) or f"no common rows of group {options.group}")
    return 0 if shown and all(met for _, met in shown) else 1


if __name__ == "__main__":
    sys.exit(main())
