"""Timing: interleaved rounds of one call per implementation, timed by device events (CUDA) or a host clock (CPU)."""

from __future__ import annotations

import statistics
import subprocess
import time
from dataclasses import dataclass

import torch

L2_FLUSH_BYTES = 256 * 2**20
MAX_ROUNDS = 1000


@dataclass(frozen=True)
class Budget:
    """How long one case is measured: at least `min_rounds` rounds and `min_ms` milliseconds per implementation."""

    min_rounds: int = 20
    min_ms: float = 60.0
    warmup_ms: float = 20.0

    def rounds(self, slowest_ms):
        return min(MAX_ROUNDS, max(self.min_rounds, int(self.min_ms / max(slowest_ms, 1e-6)) + 1))


class CudaTimer:
    """Times single calls with CUDA events.

    Before each call a buffer larger than the L2 cache is overwritten, so that every call starts from the same cache
    state, and so that the host has time to enqueue the call: the events then enclose device work only.
    """

    def __init__(self, device):
        self.device = device
        self.flush = torch.empty(L2_FLUSH_BYTES, dtype=torch.uint8, device=device)
        self.clock = SmClock(device)
        self.spin_up()

    def spin_up(self, seconds=1.0):
        """Keeps the GPU busy for a second, so that the first row does not see idle clocks."""
        matrix = torch.randn(4096, 4096, dtype=torch.bfloat16, device=self.device)
        stop = time.perf_counter() + seconds
        while time.perf_counter() < stop:
            matrix @ matrix
            self.synchronize()

    def start_region(self):
        torch.cuda.synchronize(self.device)
        self.clock.start()

    def stop_region(self):
        """Returns the mean SM clock in MHz since start_region (None if unknown)."""
        return self.clock.stop()

    def record(self, call):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.flush.zero_()
        start.record()
        call()
        stop.record()
        return start, stop

    def milliseconds(self, records):
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(stop) for start, stop in records]

    def synchronize(self):
        torch.cuda.synchronize(self.device)


class CpuTimer:
    """Times single calls with the host's monotonic clock."""

    def start_region(self):
        pass

    def stop_region(self):
        return None

    def record(self, call):
        start = time.perf_counter()
        call()
        return start, time.perf_counter()

    def milliseconds(self, records):
        return [(stop - start) * 1e3 for start, stop in records]

    def synchronize(self):
        pass


def make_timer(device):
    return CudaTimer(device) if device.type == "cuda" else CpuTimer()


class SmClock:
    """Mean SM clock over a region: cycles counted by the SMs over the time of the GPU's global timer.

    Without Triton: one reading of nvidia-smi at the end of the region. `source` says which was used.
    """

    def __init__(self, device):
        self.device = device
        try:
            self.sample = make_clock_sampler(device)
            self.sample()
            self.source = "clock64 / globaltimer"
        except (
            Exception
        ) as error:  # Triton raises its own types for a missing compiler or driver; the clock is informative only
            self.sample = None
            self.source = f"nvidia-smi, one reading after the region ({type(error).__name__} from the in-kernel clock)"
        self.before = None

    def start(self):
        self.before = self.sample() if self.sample else None

    def stop(self):
        if self.sample is None:
            torch.cuda.synchronize(self.device)
            return read_nvidia_smi("clocks.sm", self.device)
        return mean_clock_mhz(self.before, self.sample())


def mean_clock_mhz(before, after):
    """`before`, `after`: {sm: (cycles, nanoseconds)}; the median over the SMs seen twice, None if there is none."""
    rates = [
        (after[sm][0] - cycles) * 1e3 / (after[sm][1] - nanoseconds)
        for sm, (cycles, nanoseconds) in before.items()
        if sm in after and after[sm][1] > nanoseconds
    ]
    return statistics.median(rates) if rates else None


def make_clock_sampler(device):
    """Returns a function that reads (cycle counter, global timer) of every SM, after the work enqueued so far."""
    from clock_kernel import read_clocks

    blocks = 4 * torch.cuda.get_device_properties(device).multi_processor_count
    buffer = torch.zeros((blocks, 3), dtype=torch.int64, device=device)

    def sample():
        with torch.cuda.device(device):
            read_clocks[(blocks,)](buffer, num_warps=1)
        return {sm: (cycles, nanoseconds) for sm, cycles, nanoseconds in buffer.tolist()}

    return sample


def read_nvidia_smi(field, device):
    """One number of nvidia-smi's query interface (None without nvidia-smi); `device` may be any torch.device."""
    index = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    if index is not None:
        command.append(f"--id=GPU-{index}")
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    value = text.strip().splitlines()[0] if text.strip() else ""
    try:
        return float(value)
    except ValueError:
        return value or None


def warm_up(timer, call, budget):
    """Runs `call` until `warmup_ms` have passed; returns the shortest time seen (ms)."""
    best, spent = float("inf"), 0.0
    for _ in range(MAX_ROUNDS):
        (elapsed,) = timer.milliseconds([timer.record(call)])
        best = min(best, elapsed)
        spent += elapsed
        if spent >= budget.warmup_ms:
            break
    return best


def interleave(timer, calls, budget):
    """Times `calls` ({name: (context factory, function)}) in rounds A B A B …, the order rotated every round.

    The context (choice of an SDPA backend) is entered outside the timed region.
    Returns ({name: [ms, …]}, mean SM clock in MHz or None).
    """
    estimates = {}
    for name, (context, call) in calls.items():
        with context():
            estimates[name] = warm_up(timer, call, budget)
    rounds = budget.rounds(min(estimates.values()))
    if max(estimates.values()) * rounds > 20 * budget.min_ms:
        rounds = max(budget.min_rounds, int(20 * budget.min_ms / max(estimates.values())))
    names = list(calls)
    records = {name: [] for name in names}
    timer.start_region()
    for index in range(rounds):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            context, call = calls[name]
            with context():
                records[name].append(timer.record(call))
        if index % 16 == 15:
            timer.synchronize()
    clock = timer.stop_region()
    return {name: timer.milliseconds(entries) for name, entries in records.items()}, clock


def host_overhead_us(device, calls, calls_per_loop=100, loops=15):
    """Host time of one eager call in microseconds: the time to enqueue it, without waiting for the device.

    `calls` as for interleave; the loops of the implementations are interleaved. Returns {name: [us, …]}.
    """
    samples = {name: [] for name in calls}
    for loop in range(loops + 2):
        for name, (context, call) in calls.items():
            with context():
                torch.cuda.synchronize(device)
                start = time.perf_counter()
                for _ in range(calls_per_loop):
                    call()
                elapsed = time.perf_counter() - start
                torch.cuda.synchronize(device)
            if loop >= 2:
                samples[name].append(elapsed / calls_per_loop * 1e6)
    return samples


def summarize(samples):
    """Median, 10th and 90th percentile and the count of a list of samples."""
    ordered = sorted(samples)
    return {
        "median": statistics.median(ordered),
        "p10": ordered[int(0.1 * (len(ordered) - 1))],
        "p90": ordered[int(0.9 * (len(ordered) - 1))],
        "rounds": len(ordered),
    }
