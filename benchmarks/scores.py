"""What a result of benchmarks/run.py says: speeds, ratios, scores. Plain data, no torch."""

from __future__ import annotations

import math
from statistics import geometric_mean

PLAIN = "ours_plain"  # computes another problem than the row's: the row's speed relative to it is its share of plain
DETERMINISTIC = "ours_deterministic"
# The fastest of other packages: a word for cells, a title; which a result has depends on what was installed.
PEERS = {
    "sdpa_flash": ("FA2", "FlashAttention-2 (SDPA)"),
    "sdpa_cudnn": ("cuDNN", "cuDNN (SDPA)"),
    "flash_attn_3": ("FA3", "FlashAttention-3"),
    "flash_attn_4": ("FA4", "FlashAttention-4"),
}
OURS = ("ours", DETERMINISTIC, PLAIN, "ours_fp8", "ours_fp8_fast", "ours_tangents")


def modes(result):
    return list(dict.fromkeys(row["mode"] for row in result["rows"]))


def rows_of(result, group, mode=None):
    """The rows of one group (or of a tuple of groups) and, if given, one mode."""
    groups = (group,) if isinstance(group, str) else group
    return [row for row in result["rows"] if row["group"] in groups and mode in (None, row["mode"])]


def significant(value):
    """Three significant digits without an exponent: 0.0712, 4.31, 648."""
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 0 else "0"


def gigabytes_per_second(row, name):
    entry = row["results"].get(name)
    return row["bytes"] / entry["ms"] / 1e6 if entry else 0.0


def speed(row, name):
    """TFLOPS of an implementation, or GB/s in rows over a KV cache."""
    return significant(gigabytes_per_second(row, name) if row.get("bytes") else row["results"][name]["tflops"])


def share_of_plain(row):
    """Speed of ours relative to its plain dense call of the same size in the same rounds; None without one."""
    plain = row["results"].get(PLAIN)
    return row["results"]["ours"]["tflops"] / plain["tflops"] if plain and "ours" in row["results"] else None


def ratios(result, peer, mode, group="cells", name="ours"):
    """[(label, time of `peer` ÷ time of `name`)] of the rows that have both."""
    found = [(row["label"], row["results"]) for row in rows_of(result, group, mode)]
    return [(label, of[peer]["ms"] / of[name]["ms"]) for label, of in found if {name, peer} <= of.keys()]


def best_ratios(rows, peers=tuple(PEERS)):
    """[(label, time of the fastest of `peers` ÷ time of ours, that peer)] of the rows that have ours and a peer."""
    found = []
    for row in rows:
        times = {peer: row["results"][peer]["ms"] for peer in peers if peer in row["results"]}
        if times and "ours" in row["results"]:
            fastest = min(times, key=times.get)
            found.append((row["label"], times[fastest] / row["results"]["ours"]["ms"], fastest))
    return found


def score_line(found, title):
    """'title: geometric mean …, worst …' of the (label, ratio) pairs."""
    label, worst = min(found, key=lambda item: item[1])
    mean, slower = geometric_mean([ratio for _, ratio in found]), sum(ratio < 1 for _, ratio in found)
    return f"{title}: geometric mean {mean:.3f}x, worst {worst:.3f}x ({label}), {slower} of {len(found)} slower"


def judged_pairs(result):
    """(implementation, peer) of the scores: ours against every peer, our deterministic backward against all others."""
    names = [name for name in result["implementations"] if name != PLAIN]
    pairs = [("ours", peer) for peer in names if peer not in OURS]
    return pairs + [(DETERMINISTIC, peer) for peer in names if peer != DETERMINISTIC and DETERMINISTIC in names]


def overhead_lines(result):
    problems = {"host_overhead": "b1 s128 h16 d64", "host_overhead_cache": "cache, b1 k1024 h32/8 d128"}
    lines = []
    for key, problem in problems.items():
        if result.get(key):
            figures = ", ".join(f"{name} {entry['median']:.1f}" for name, entry in result[key].items())
            lines.append(f"host time of one eager call ({problem}), us: {figures}")
    return lines


def memory_lines(result):
    """Device memory that one call adds, per mode, at the row with most implementations, or the longest."""
    chosen = {}
    for row in result["rows"]:
        entries = {name: entry for name, entry in row["results"].items() if name != PLAIN}
        if any("result_bytes" in entry for entry in row["results"].values()):
            chosen.setdefault(row["mode"], []).append((row, entries))
    lines = []
    for candidates in chosen.values():
        row, entries = max(candidates, key=lambda item: (len(item[1]), item[0]["seqlen_q"]))
        figures = ", ".join(
            f"{name} {entry['result_bytes'] / 2**20:.1f} + {(entry['peak_bytes'] - entry['result_bytes']) / 2**20:.1f}"
            for name, entry in entries.items()
        )
        lines.append(f"memory added by one call ({row['label']} {row['mode']}), MiB of results + other: {figures}")
    return lines
