"""The tables of the minimal kernels: `python examples/minimal/table.py RESULT.json [--write]`.

RESULT.json comes from run.sh; --hopper adds what the Hopper ladder (../hopper) found. Where flash_attn and a GPU are
found, both families of the library's kernels are timed on the same problems and added to it. --write puts the tables
into the README next to this file and that of the Hopper ladder, and with them those of which --budget and
--latency name the text.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import statistics
from pathlib import Path
from unittest import mock

README = Path(__file__).resolve().parent / "README.md"
HOPPER_README = README.parents[1] / "hopper" / "README.md"
LAUNCHES = 30
SHAPE = {"b": "batch", "s": "seqlen", "h": "heads", "d": "head_dim"}  # of q, k, v

# name in the JSON -> what it is; each rung is the one before and one technique more
RUNGS = {
    "plain_loops": "1: plain loops, S and P in shared memory",
    "tensor_cores": "2: tensor cores, S and P in registers: 64 × 64 tiles, 16 rows a warp",
    "padding": "3: padded rows of shared memory: no bank conflicts",
    "swizzle": "4: swizzled rows instead: none either, and no memory",
    "double_buffer": "5: two buffers: the next tile is copied while this one is computed",
    "lagging_max": "6: a row maximum that lags: the output is seldom rescaled",
}
SIDE_STEPS = {
    "two_stages": "rung 3 with two buffers",
    "two_bands": "rung 3 with 32 rows a warp: each fragment of K and V is used for two products",
    "wide_tile": "rung 3 with 128 keys a tile: half the barriers and maxima per key",
    "buffered_bands": "rung 5 with 32 rows a warp",
}
HOPPER_RUNGS = {
    "wgmma_alone": "1: wgmma, tiles copied by cp.async of all threads",
    "tma": "2: tiles copied by TMA, which one thread starts",
    "producer": "3: a warpgroup that only copies: consumers wait for bytes, not for each other",
    "overlap": "4: P V of a tile runs during the softmax of the next one",
    "ping_pong": "5: consumers start products in turns: one multiplies while the other exponentiates",
}
HOPPER_SIDE_STEPS = {
    "no_overlap": "rung 5 without overlap",
    "no_producer": "rung 4 without a producer",
    "no_tma": "rung 4 without producer and TMA",
}
# families of the library that FLASH_ATTN_FAMILY forces
FAMILIES = {
    "mma_sync": "the library's mma.sync kernels, `flash_attn_func`",
    "wgmma": "the library's wgmma kernels",
}


def measure_library(result):
    """{commit, variants: [{name, full, causal}]}: TFLOPS of flash_attn_func on the problem of `result` by each family
    of kernels that this GPU runs, and the commit of their build; None without flash_attn or a GPU."""
    try:
        import torch

        import flash_attn
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    shape = [result[key] for key in SHAPE.values()]
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    hopper = torch.cuda.get_device_capability()[0] == 9
    entries = []
    for family in FAMILIES if hopper else ("mma_sync",):
        entries.append({"name": family})
        for name, causal in (("full", False), ("causal", True)):
            flops = 4 * q.numel() * shape[1] * (0.5 if causal else 1.0)
            with mock.patch.dict(os.environ, FLASH_ATTN_FAMILY=family):  # read at every call
                attention = functools.partial(flash_attn.flash_attn_func, q, k, v, causal=causal)
                milliseconds = median_milliseconds(torch, attention)
            entries[-1][name] = round(flops / milliseconds / 1e9, 1)
    return {"commit": flash_attn.__build__.get("commit"), "variants": entries}


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


def resources(entry):
    """Registers of a thread, bytes spilled, blocks of an SM, as the CUDA runtime tells them."""
    if "registers" not in entry:
        return "–"
    return f"{entry['registers']}, {entry['local_bytes']}, {entry['blocks_per_sm']}"


def table(result, rungs=RUNGS, side_steps=SIDE_STEPS, family="mma_sync"):
    """The result as Markdown, compared with a family of the library. Kernels that it has no figures of are left out."""
    entries = {entry["name"]: entry for entry in result["variants"]}
    library = entries.get(family)
    problem = ", ".join(f"{letter} {result[key]}" for letter, key in SHAPE.items())
    names = {"rungs_commit": "the rungs", "commit": "the library"}
    commits = [f", {name} of commit {result[key][:12]}" for key, name in names.items() if result.get(key)]
    lines = [
        f"{result['device']}, {problem}, bf16{''.join(commits)}:",
        "",
        f"| kernel | TFLOPS | causal | × the rung before | of the library's {family.replace('_', '.')} "
        "| registers, spilled, blocks/SM |",
        "|---|---|---|---|---|---|",
    ]
    before = None
    for name, description in {**rungs, **side_steps, **FAMILIES}.items():
        entry = entries.get(name)
        if entry:
            gain = f"{entry['full'] / before['full']:.2f}" if before and name in rungs else "–"
            share = f"{entry['full'] / library['full']:.0%}" if library else "–"
            cells = [f"{entry['full']:.0f}", f"{entry['causal']:.0f}", gain, share, resources(entry)]
            lines.append("| " + " | ".join([description, *cells]) + " |")
        before = entry
    return "\n".join(lines)


def hopper_table(result):
    """Of a result that has the Hopper ladder, else nothing."""
    return "" if "hopper" not in result else table(result["hopper"], HOPPER_RUNGS, HOPPER_SIDE_STEPS, "wgmma")


def written(text, content, name="minimal"):
    """`text` with `content` between the markers of a block."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"expected the markers {begin} and {end}")
    return pattern.sub(lambda _: f"{begin}\n{content.strip()}\n{end}", text)


def write_block(content, name, page=README):
    page.write_text(written(page.read_text(encoding="utf-8"), content, name), encoding="utf-8")


def with_library(result):
    """The result with the figures of the library, where they can be measured."""
    library = None if any(entry["name"] in FAMILIES for entry in result["variants"]) else measure_library(result)
    return {**result, **library, "variants": result["variants"] + library["variants"]} if library else result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--write", action="store_true", help="put the tables into the pages")
    parser.add_argument("--budget", type=Path, metavar="FILE", help="with --write: what `main --budget` printed")
    parser.add_argument("--latency", type=Path, metavar="FILE", help="with --write: what `latency` printed")
    parser.add_argument("--hopper", type=Path, metavar="FILE", help="the result of the Hopper ladder")
    arguments = parser.parse_args()
    result = with_library(json.loads(arguments.result.read_text(encoding="utf-8")))
    if arguments.hopper:
        result["hopper"] = with_library(json.loads(arguments.hopper.read_text(encoding="utf-8")))
    arguments.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    tables = {("minimal", README): table(result)}
    if "hopper" in result:
        tables["hopper", HOPPER_README] = hopper_table(result)
    print("\n\n".join(tables.values()))
    if arguments.write:
        for (name, page), content in tables.items():
            write_block(content, name, page)
        for name in ("budget", "latency"):
            if file := getattr(arguments, name):
                write_block(file.read_text(encoding="utf-8"), name)


if __name__ == "__main__":
    main()
