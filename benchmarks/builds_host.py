"""Host time of small calls of two installed packages, by two processes that take turns.

python benchmarks/builds_host.py SITE DEVICE CALLS    one of them: answers each line of input with a loop's times

One process imports one package, so the public functions of two builds, with the Python code of each, need one each.
The process that is not asked waits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

LOOPS, WARM_UP_LOOPS, CALLS_PER_LOOP = 16, 2, 100


def small_calls(device):
    """{name: function} of the public functions of the package that this process imports."""
    import torch
    from implementations import IMPLEMENTATIONS, make_inputs, timed_call
    from rows import CACHE_HOST_CASE, HOST_CASE, Row
    from shared import Case

    packed = Case(1, 128, 128, 16, 16, 64, HOST_CASE.dtype, kind="packed", seqlens=(128,))
    problems = {
        "dense fwd": (HOST_CASE, "fwd"),
        "dense fwd+bwd": (HOST_CASE, "fwd+bwd"),
        "packed fwd": (packed, "fwd"),
        "cache": (CACHE_HOST_CASE, "fwd"),
    }
    calls = {}
    for name, (case, mode) in problems.items():
        row = Row("host", case)
        inputs = make_inputs(row, torch.device(device), requires_grad=mode != "fwd")
        calls[name] = timed_call(IMPLEMENTATIONS["ours"].call(row, inputs), inputs, mode)
    return calls


def answer(site, device, calls_per_loop):
    """One JSON line: where the package lies; then, for each line of input, {call: us of one call} of one loop each."""
    import torch

    import flash_attn

    calls = small_calls(device)
    place = Path(flash_attn.__file__).resolve().parents[1]
    assert place == Path(site).resolve(), f"expected the package of {site}, imported that of {place}"
    wait = torch.cuda.synchronize if device != "cpu" else lambda: None
    print(json.dumps(str(place)), flush=True)
    for _ in sys.stdin:
        times = {}
        for name, call in calls.items():
            wait()
            start = time.perf_counter()
            for _ in range(calls_per_loop):
                call()
            times[name] = (time.perf_counter() - start) / calls_per_loop * 1e6
            wait()
        print(json.dumps(times), flush=True)


class Worker:
    """A process that measures the package in `site`."""

    def __init__(self, site, device, calls_per_loop):
        paths = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        command = [sys.executable, str(HERE / "builds_host.py"), str(site), device, str(calls_per_loop)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
        )

    def read(self):
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of the host times ended with status {self.process.wait()}")
        return json.loads(line)

    def loop(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.read()

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def measure_host(sites, device, loops=LOOPS, calls_per_loop=CALLS_PER_LOOP):
    """{call: {build: [us, ...]}} of {build: site}; loops in the order A B B A."""
    workers = {name: Worker(site, device, calls_per_loop) for name, site in sites.items()}
    samples = {}
    try:
        for worker in workers.values():
            worker.read()
        for index in range(-WARM_UP_LOOPS, loops):
            names = list(workers) if index % 2 == 0 else list(reversed(workers))
            for name in names:
                for call, us in workers[name].loop().items():
                    if index >= 0:
                        samples.setdefault(call, {n: [] for n in workers})[name].append(us)
    finally:
        for worker in workers.values():
            worker.close()
    return samples


if __name__ == "__main__":
    answer(sys.argv[1], sys.argv[2], int(sys.argv[3]))
