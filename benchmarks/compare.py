"""Score of a result against a peer measured in the same run, or against an earlier result.

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

sys.path.insert(0, str(Path(__file__).resolve().parent))  # absent under PYTHONSAFEPATH

from report import PLAIN, environment_line, geometric_mean, judged_pairs, load, modes, ratios, score_line


@dataclass(frozen=True)
class Target:
    """The least geometric mean and the least single ratio of the speed of `name` relative to `peer`."""

    group: str
    mode: str
    peer: str
    mean: float = 0.0
    worst: float = 0.0
    name: str = "ours"


TARGETS = (
    *(Target("cells", mode, "sdpa_flash", mean=1.0, worst=0.95) for mode in ("fwd", "bwd", "fwd+bwd")),
    *(Target("gqa", mode, "sdpa_flash", worst=1.2) for mode in ("bwd", "fwd+bwd")),
    *(Target("cells", mode, "triton", worst=1.0) for mode in ("fwd", "bwd", "fwd+bwd")),
    Target("deterministic", "bwd", "ours", mean=0.8, name="ours_deterministic"),
)


def judge(target, result):
    """(line, whether the target is met) for one run; what was not measured is not met."""
    title = f"{target.group} {target.mode}, {target.name} vs {target.peer}"
    wanted = f"mean >= {target.mean:g}" if target.mean else ""
    wanted += (", " if wanted and target.worst else "") + (f"worst >= {target.worst:g}" if target.worst else "")
    found = ratios(result, result, target.peer, target.mode, target.group, target.name)
    if not found:
        return f"unknown {title}: not measured ({wanted})", False
    values = [ratio for _, ratio in found]
    met = geometric_mean(values) >= target.mean and min(values) >= target.worst
    return f"{'met' if met else 'missed':<7} {score_line(found, title)} ({wanted})", met


def print_targets(result):
    print(environment_line(result))
    judged = [judge(target, result) for target in TARGETS]
    print("\n".join(line for line, _ in judged))
    return 0 if all(met for _, met in judged) else 1


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("new")
    parser.add_argument("old", nargs="?")
    parser.add_argument("--name", default="ours", help="the implementation that is judged")
    parser.add_argument("--peer", help="the implementation it is judged against")
    parser.add_argument("--group", default="cells", help="the group of rows, or all")
    parser.add_argument("--min-mean", type=float, default=0.0, help="least geometric mean")
    parser.add_argument("--min-worst", type=float, default=0.0, help="least single ratio")
    parser.add_argument("--targets", action="store_true", help="judge the scores that this package is to reach")
    parser.add_argument("--rows", action="store_true", help="print every row's ratio")
    return parser.parse_args(arguments)


def main(arguments=None):
    options = parse(arguments)
    new = load(options.new)
    if options.targets:
        return print_targets(new)
    old = load(options.old) if options.old else new
    if options.old:
        pairs = [(options.name, options.peer or options.name)]
        print(f"new: {environment_line(new)}\nold: {environment_line(old)}")
    elif options.peer:
        pairs = [(options.name, options.peer)]
    elif options.name == "ours":
        pairs = judged_pairs(new)
    else:
        pairs = [(options.name, peer) for peer in new["implementations"] if peer not in (options.name, PLAIN)]
    groups = new["groups"] if options.group == "all" else [options.group]
    compared, failed = 0, False
    for mode, group, (name, peer) in itertools.product(modes(new), groups, pairs):
        found = ratios(new, old, peer, mode, group, name)
        if not found:
            continue
        compared += 1
        if options.rows:
            print("\n".join(f"{label:<44} {ratio:.3f}x" for label, ratio in found))
        values = [ratio for _, ratio in found]
        failed |= geometric_mean(values) < options.min_mean or min(values) < options.min_worst
        against = f"{peer} of the old result" if options.old else peer
        print(score_line(found, f"{group} {mode}, {name} vs {against}"))
    if not compared:
        print(f"no common rows of group {options.group} for {options.name} and {', '.join(peer for _, peer in pairs)}")
    return 1 if failed or not compared else 0


if __name__ == "__main__":
    sys.exit(main())
