"""Takes the results of one run of the laboratory into benchmarks/results, draws their plots, and writes the documents:

    python benchmarks/lab_publish.py FOLDER [--also NAME ...] [--results benchmarks/results] [--no-docs]

FOLDER is the --out of lab.py. All results have to be of one commit and one GPU; those of before that they replace are
removed. An experiment that failed is left out, unless --also names it. Needs matplotlib; no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # absent under PYTHONSAFEPATH

import ablate_report
import lab
import scores
import theory_model
import theory_page
import triton_ladder_page
from kvcache_plots import write_kvcache_plots
from plots import write_plots

ROOT = lab.ROOT
RESULTS = ROOT / scores.RESULTS


def of_run(folder, also=()):
    """{experiment: path of its result} of what one GPU measured, without what failed but for `also`."""
    state = scores.load_stored(folder / lab.STATE) or {}
    failed = {name for name, ended in state.items() if not ended["good"]} - set(also)
    found = {}
    for experiment in lab.EXPERIMENTS:
        if experiment.name in failed:
            continue
        paths = sorted(folder.glob(experiment.result.format(gpu="*")))
        paths = [path for path in paths if path.name.removesuffix(f"_{experiment.name}.json").isalnum()]
        if experiment.of_the_run and paths:
            found[experiment.name] = paths[-1]
    return found


def commit_of(result):
    """The commit of the package, or of the tree, that a result is of."""
    if "flash_attn" in result:
        return result["flash_attn"]["commit"][:12]
    return scores.measured_commit(result) if "git" in result else (result.get("commit") or "unknown")[:12]


def device_of(result):
    device = result["device"]
    return (device["name"] if isinstance(device, dict) else device).split(",")[0]


def disagreement(paths):
    """Why results are not of one run, or None."""
    results = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items()}
    for what, read in (("commit", commit_of), ("GPU", device_of)):
        found = {name: read(result) for name, result in results.items()}
        if len(set(found.values())) > 1:
            return f"expected results of one {what}, got {found}"
    unfinished = [name for name, result in results.items() if result.get("finished") is False]
    return f"not finished: {', '.join(unfinished)}" if unfinished else None


def remove_earlier(name, results):
    """Removes the results of an experiment, whichever GPU measured them, and its plots."""
    for path in results.glob(f"*_{name}.json"):
        if path.name.removesuffix(f"_{name}.json").isalnum():
            path.unlink()
    shutil.rmtree(results / f"plots_{name}", ignore_errors=True)


def load_example(name):
    sys.path.append(str(ROOT))  # its package need not be installed
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where its dataclasses look for their types
    spec.loader.exec_module(module)
    return module


def draw(name, result, results):
    """The plots of a result, if it has any."""
    if name == "ablate":
        for family in result["families"]:
            ablate_report.write_plot(result, family, results / ablate_report.PLOTS.name / f"{family}.png")
    elif name == "theory":
        theory_page.draw(results / "plots_theory" / "roofline.png", theory_model.machine_of(result), result)
    elif name == "triton_ladder":
        triton_ladder_page.draw(results / "plots_triton" / "ladder.png", result)
    elif name == "train_char_lm":
        path = results / "plots_train" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        load_example(name).write_plot(result, path)
    elif "implementations" in result:
        caption, folder = scores.environment_line(result), results / f"plots_{name}"
        write_plots(result, folder, caption)
        write_kvcache_plots(result, folder, caption)


def publish(folder, results=RESULTS, also=()):
    """Copies and draws; returns the names of the experiments. SystemExit if they are not of one run."""
    paths = of_run(folder, also)
    reason = disagreement(paths) if paths else f"{folder}: no results"
    if reason:
        sys.exit(f"error: {reason}")
    for name, path in paths.items():
        remove_earlier(name, results)
        shutil.copyfile(path, results / path.name)
        draw(name, json.loads(path.read_text(encoding="utf-8")), results)
    return list(paths)


def write_documents():
    """In processes of their own: the pages look for results when they are loaded."""
    subprocess.run([sys.executable, str(ROOT / "benchmarks" / "report.py"), "--docs"], check=True)
    minimal = ROOT / scores.stored_path("minimal")
    if minimal.is_file():
        program = ROOT / "examples" / "minimal" / "table.py"
        subprocess.run([sys.executable, str(program), str(minimal), "--write"], check=True)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where lab.py has left the results")
    parser.add_argument("--also", nargs="+", default=[], metavar="NAME", help="take it though it failed")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where they go (benchmarks/results)")
    parser.add_argument("--no-docs", action="store_true", help="leave the documents as they are")
    options = parser.parse_args(arguments)
    names = publish(options.folder, options.results, options.also)
    missing = [experiment.name for experiment in lab.EXPERIMENTS if experiment.of_the_run]
    missing = [name for name in missing if name not in names]
    print(f"taken: {' '.join(names)}" + (f"; without: {' '.join(missing)}" if missing else ""))
    if not options.no_docs:
        write_documents()
    return 0


if __name__ == "__main__":
    sys.exit(main())
