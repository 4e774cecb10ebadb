"""Results as files: compact tables in benchmarks/results, one JSON for each experiment, and where they are from.

A program writes everything that it measures; compact() keeps of it what a page can show: medians to six
digits, ranges to four, the device, the versions and the commit, but no samples.
"""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DIGITS, RANGE_DIGITS = 6, 4
# Fields that no page shows, or that others say too.
DROPPED = {"id", "plain_id", "timing", "rounds", "relative_error", "design", "one_gpu_seconds", "failed"}
MEMORY, MEMORY_OF = {"peak_bytes", "result_bytes"}, ("grid",)  # only this result tells of memory
OUT_OF_MEMORY = "out of memory"  # the one note of a row that is stored
LINE = 2000  # characters: what is longer is written over several lines


def load(path):
    return json.loads(Path(path).read_text(encoding="utf-8"))


def stored_path(name):
    """The file of an experiment's compact result."""
    return RESULTS / f"{name}.json"


def stored(name):
    """The compact result of an experiment."""
    return load(stored_path(name))


def compact(result, name=""):
    """What is stored of a result that a program wrote, of the experiment `name`."""
    kept = {key: value for key, value in result.items() if key not in ("git", "build", "flash_attn", "dirty", "method")}
    kept["commit"] = measured_commit(result)
    if "runs" in result:
        runs = {name: {**run, "losses": [run["losses"][0], run["losses"][-1]]} for name, run in result["runs"].items()}
        kept["runs"] = runs
    return rounded(kept, DROPPED | (set() if name in MEMORY_OF else MEMORY))


def shortened(number, digits=DIGITS):
    return float(f"{number:.{digits}g}")


def rounded(value, dropped):
    """The value with floats of six digits, without `dropped` fields, other notes, and FLOPs and seconds of rows."""
    if isinstance(value, float):
        return shortened(value)
    if isinstance(value, (list, tuple)):
        return [rounded(x, dropped) for x in value]
    if not isinstance(value, dict):
        return value
    dropped_here = dropped | ({"seconds"} if "results" in value or "registers" in value else set())
    kept = {key: x for key, x in value.items() if key not in dropped_here and (key != "flops" or isinstance(x, dict))}
    notes = {name: note for name, note in kept.pop("notes", {}).items() if note == OUT_OF_MEMORY}
    if notes:
        kept["notes"] = notes
    if "p10" in kept:
        kept["range"] = [shortened(kept.pop(end), RANGE_DIGITS) for end in ("p10", "p90")]
    return {key: rounded(x, dropped) for key, x in kept.items()}


def text_of(value, indent=0):
    """JSON in which whatever fits is one line."""
    line = json.dumps(value, ensure_ascii=False)
    if indent + len(line) <= LINE or not isinstance(value, (dict, list)):
        return line
    inner, end = " " * (indent + 1), " " * indent
    if isinstance(value, list):
        return "[\n" + ",\n".join(inner + text_of(x, indent + 1) for x in value) + f"\n{end}]"
    entries = (f"{inner}{json.dumps(key, ensure_ascii=False)}: {text_of(x, indent + 1)}" for key, x in value.items())
    return "{\n" + ",\n".join(entries) + f"\n{end}}}"


def store(name, result, folder=RESULTS):
    """Writes the compact form of a result; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(text_of(compact(result, name)) + "\n", encoding="utf-8")
    return path


def measured_commit(result):
    """The commit of the package's build, else of the tree; "+changes" if files differ from it."""
    build = result.get("build") or result.get("flash_attn") or {}
    if (build.get("commit") or "unknown") != "unknown":
        commit, changed = build["commit"], build["commit"].endswith("-dirty")
    else:
        git = result.get("git") or result
        commit = git.get("commit") or "unknown"
        changed = bool(git.get("dirty")) or commit.endswith("+changes")
    return commit[:12].removesuffix("-dirty").removesuffix("+changes") + "+changes" * changed


def device_name(result):
    device = result["device"]
    return (device["name"] if isinstance(device, dict) else device).split(",")[0]


def environment_line(result):
    """Device, versions, clocks and commit in a sentence without a full stop."""
    device, versions = result["device"], result["versions"]
    cuda = device["type"] == "cuda"
    clocks = [row["sm_mhz"] for row in result["rows"] if row.get("sm_mhz")]
    parts = [
        device["name"],
        device.get("driver") and f"driver {device['driver']}",
        f"CUDA {versions['cuda']}" if cuda else f"{device['threads']} threads",
        f"torch {versions['torch']}",
        cuda and f"cuDNN {versions['cudnn']}",
        clocks and f"SM clock {min(clocks):.0f}–{max(clocks):.0f} MHz",
        f"commit {measured_commit(result)}",
    ]
    return ", ".join(part for part in parts if part)


def run_line(result):
    """Device, commit and versions of a result of the laboratory's own kernels."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return f"{result['device']['name']}, commit {measured_commit(result)}; {versions}."
