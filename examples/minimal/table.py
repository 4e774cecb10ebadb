"""The table of the minimal kernel: `python examples/minimal/table.py RESULT.json [--write]`.

RESULT.json comes from run.sh. Where flash_attn and a GPU are found, the full kernel is timed on the same problem and
added to it. --write puts the table into the README beside this file.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from pathlib import Path

README = Path(__file__).resolve().parent / "README.md"
MARKERS = ("<!-- minimal:begin -->", "<!-- minimal:end -->")
LAUNCHES = 30
SHAPE = {"b": "batch", "s": "seqlen", "h": "heads", "d": "head_dim"}  # of q, k, v

# name in the JSON -> what it is
VARIANTS = {
    "minimal": "the minimal kernel: 64 × 64 tiles, 16 rows a warp, one buffer",
    "unpadded": "without the padding of shared rows: 8-way bank conflicts",
    "two_stages": "with two buffers: the next tile is copied while this one is computed",
    "two_bands": "with 32 rows a warp: each fragment of K and V serves two products",
    "wide_tile": "with 128 keys a tile: half the barriers and maxima per key",
    "full": "the full kernel, `flash_attn_func`",
}


def measure_full_kernel(result):
    """TFLOPS of flash_attn_func on the problem of `result`, full and causal; None without flash_attn or a GPU."""
    try:
        import torch

        from flash_attn import flash_attn_func
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    shape = [result[key] for key in SHAPE.values()]
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    entry = {"name": "full"}
    for name, causal in (("full", False), ("causal", True)):
        flops = 4 * q.numel() * shape[1] * (0.5 if causal else 1.0)
        milliseconds = median_milliseconds(torch, lambda causal=causal: flash_attn_func(q, k, v, causal=causal))
        entry[name] = round(flops / milliseconds / 1e9, 1)
    return entry


def median_milliseconds(torch, call):
    """Median of single calls by device events, as main.cu does."""
    times = []
    for _ in range(LAUNCHES + 3):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times[3:])


def table(result):
    """The result as Markdown."""
    entries = {entry["name"]: entry for entry in result["variants"]}
    full = entries.get("full")
    problem = ", ".join(f"{letter} {result[key]}" for letter, key in SHAPE.items())
    lines = [
        f"{result['device']}, {problem}, bf16:",
        "",
        "| kernel | TFLOPS | causal | of the full kernel |",
        "|---|---|---|---|",
    ]
    for name, description in VARIANTS.items():
        if name in entries:
            entry = entries[name]
            share = f"{entry['full'] / full['full']:.0%}" if full else "–"
            lines.append(f"| {description} | {entry['full']:.0f} | {entry['causal']:.0f} | {share} |")
    return "\n".join(lines)


def written(text, content):
    """`text` with `content` between the markers."""
    begin, end = MARKERS
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    return pattern.sub(lambda _: f"{begin}\n{content}\n{end}", text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--write", action="store_true", help=f"put the table into {README.name}")
    arguments = parser.parse_args()
    result = json.loads(arguments.result.read_text(encoding="utf-8"))
    if not any(entry["name"] == "full" for entry in result["variants"]):
        full = measure_full_kernel(result)
        if full is not None:
            result["variants"].append(full)
            arguments.result.write_text(json.dumps(result, indent=1), encoding="utf-8")
    content = table(result)
    print(content)
    if arguments.write:
        README.write_text(written(README.read_text(encoding="utf-8"), content), encoding="utf-8")


if __name__ == "__main__":
    main()
