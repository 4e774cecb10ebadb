"""Compiles one .cu file and judges it: called by ninja for every kernel file (see kernel_build.py).

Next to the object it leaves <object>.log (what nvcc and ptxas said) and <object>.json (key of the inputs, seconds,
resources of each kernel). If the inputs have the contents of the last run, the object is kept as it is.
Exit status 1 without an object: nvcc failed, a fatal ptxas diagnostic, or spills beyond the budget of the tuned CUDA.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from ptx_registers import renamed
from resources import (
    fatal_diagnostics,
    load_budget,
    over_budget,
    parse_ptxas_log,
    spill_bytes,
    variants_of,
    with_variant_names,
)


def dependencies(depfile: Path) -> list[str]:
    """Prerequisites that a make-style dependency file lists."""
    text = depfile.read_text(encoding="utf-8").replace("\\\n", " ")
    _, _, files = text.partition(" : " if " : " in text else ": ")
    return [name.replace("\\ ", " ") for name in re.split(r"(?<!\\)\s+", files.strip()) if name]


def inputs_key(command: list[str], toolkit: str, depfile: Path) -> str | None:
    """Digest of the command, the compiler version and the contents of all files read; None if one is missing."""
    digest = hashlib.sha256("\0".join([toolkit, *command]).encode())
    try:
        for name in dependencies(depfile):
            digest.update(hashlib.sha256(Path(name).read_bytes()).digest())
    except OSError:
        return None
    return digest.hexdigest()


def demangled(names: list[str]) -> list[str]:
    """C++ names of mangled ones, by binutils' c++filt; the mangled ones where it is missing."""
    tool = shutil.which("c++filt")
    if tool is None or not names:
        return names
    result = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True, check=False)
    lines = result.stdout.splitlines()
    return lines if result.returncode == 0 and len(lines) == len(names) else names


def run(command: list[str], log_file: Path) -> str:
    """What nvcc said, which also goes to the log; exits with it if nvcc fails."""
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    log_file.write_text(result.stdout, encoding="utf-8")
    if result.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{result.stdout}nvcc exited with status {result.returncode}")
    return result.stdout


def run_with_small_ptx(command: list[str], object_file: str, log_file: Path) -> None:
    """run(), then nvcc's step that packs code for the GPU once more, with renamed PTX, into the object."""
    with tempfile.TemporaryDirectory() as folder:
        said = run([*command, "--keep", "--keep-dir", folder, "--verbose"], log_file).splitlines()
        (step,) = (line.removeprefix("#$ ") for line in said if line.startswith("#$ fatbinary "))
        for name in re.findall(r"kind=ptx,sm=\d+,file=([^\"]+)\"", step):
            Path(name).write_text(renamed(Path(name).read_text(encoding="utf-8")), encoding="utf-8")
        packed = f"{folder}/packed"
        step = re.sub(r'--(create|embedded-fatbin)="[^"]*"', "", step) + f' --create="{packed}"'
        path = os.pathsep.join([str(Path(command[0]).resolve().parent), os.environ.get("PATH", os.defpath)])
        subprocess.run(step, shell=True, check=True, env={**os.environ, "PATH": path})
        subprocess.run(["objcopy", "--update-section", f".nv_fatbin={packed}", object_file], check=True)
    log_file.write_text("".join(f"{line}\n" for line in said if not line.startswith("#$ ")), encoding="utf-8")


def compile_source(command: list[str], object_file: str, log_file: Path) -> dict:
    """Compiles. Returns seconds, CPU seconds and kernels."""
    start = time.monotonic()
    if any(",compute_" in word for word in command):
        run_with_small_ptx(command, object_file, log_file)
    else:
        run(command, log_file)
    seconds = time.monotonic() - start
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    kernels = parse_ptxas_log(log_file.read_text(encoding="utf-8"))
    for kernel, name in zip(kernels, demangled([k["name"] for k in kernels])):
        kernel["name"] = name
    cpu_seconds = usage.ru_utime + usage.ru_stime
    peak_mb = usage.ru_maxrss // 1024
    return {"seconds": round(seconds, 1), "cpu_seconds": round(cpu_seconds, 1), "peak_mb": peak_mb, "kernels": kernels}


def judge(log: str, stem: str, kernels: list[dict], budget_file: Path, toolkit: str) -> tuple[list[str], list[str]]:
    """(reasons to refuse the object, warnings). A spill with another CUDA than the tuned one must not stop an install:
    torch decides which CUDA a user has."""
    reasons = [f"{stem}: ptxas: {line}" for line in fatal_diagnostics(log)]
    budget = load_budget(budget_file)
    excess = over_budget(budget, stem, kernels)
    if excess and toolkit.split(".")[0] != budget.get("tuned_cuda", toolkit.split(".")[0]):
        return reasons, excess
    return reasons + ([*excess, f"(budgets: {budget_file.name})"] if excess else []), []


def other_warnings(log: str) -> list[str]:
    return [line for line in log.splitlines() if "warning" in line.lower()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--object", type=Path, required=True)
    parser.add_argument("--depfile", type=Path, required=True)
    parser.add_argument("--budget", type=Path, required=True)
    parser.add_argument("--toolkit", required=True, help="version of nvcc, a part of the inputs' key")
    parser.add_argument("compiler", nargs="+", help="nvcc and its flags, after --")
    arguments = parser.parse_args()

    output = ["-MD", "-MF", str(arguments.depfile), "-MT", str(arguments.object), "-c", str(arguments.source)]
    command = [*arguments.compiler, *output, "-o", str(arguments.object)]
    record_file = Path(f"{arguments.object}.json")
    log_file = Path(f"{arguments.object}.log")
    kept_depfile = Path(f"{arguments.object}.deps")  # ninja deletes the depfile once it has read it

    if arguments.object.exists() and record_file.exists() and kept_depfile.exists():
        record = json.loads(record_file.read_text(encoding="utf-8"))
        unchanged = inputs_key(command, arguments.toolkit, kept_depfile) == record["key"]
    else:
        unchanged = False
    if unchanged:
        shutil.copyfile(kept_depfile, arguments.depfile)
        os.utime(arguments.object)
    else:
        record_file.unlink(missing_ok=True)
        record = {"file": arguments.source.name, **compile_source(command, str(arguments.object), log_file)}
        shutil.copyfile(arguments.depfile, kept_depfile)
        record["key"] = inputs_key(command, arguments.toolkit, kept_depfile)
    variants = variants_of(dependencies(kept_depfile))
    for kernel in record["kernels"]:
        kernel["name"] = with_variant_names(kernel["name"], variants)

    log = log_file.read_text(encoding="utf-8")
    reasons, spills = judge(log, arguments.source.stem, record["kernels"], arguments.budget, arguments.toolkit)
    if reasons:
        arguments.object.unlink(missing_ok=True)
        sys.exit("\n".join(reasons))
    record_file.write_text(json.dumps(record, indent=1), encoding="utf-8")
    result = {
        "file": record["file"],
        "seconds": 0.0 if unchanged else record["seconds"],
        "unchanged": unchanged,
        "registers": max((k["registers"] for k in record["kernels"]), default=0),
        "spill_bytes": max((spill_bytes(k) for k in record["kernels"]), default=0),
        "warnings": [] if unchanged else other_warnings(log) + spills,
    }
    print("@result " + json.dumps(result))


if __name__ == "__main__":
    main()
