"""Timing: interleaved rounds of the implementations, timed by device events, by graph replay or by the host's clock."""

from __future__ import annotations

import copy
import random
import statistics
import subprocess
import time
from dataclasses import dataclass, replace

import torch

L2_FLUSH_BYTES = 256 * 2**20
MAX_ROUNDS = 1000
FEWEST_ROUNDS = 3  # lower bound, for slow implementations and when max_ms is used up
COMPARABLE = 4.0  # an implementation slower than this many times the fastest gets fewer rounds
CALLS_PER_GRAPH = 20
EAGER_CALLS = 50
LONGEST_LEAD_MS = 2.0  # a first call may compile for seconds
SLEEP_CYCLES_PER_MS = 2_000_000  # at the fastest clock of these GPUs: a sleep is never too short


@dataclass(frozen=True)
class Budget:
    """How long one row is measured: implementations within COMPARABLE times the fastest get at least `min_rounds`
    rounds and `min_ms` milliseconds; all get fewer in proportion if their sum would exceed `max_ms`."""

    min_rounds: int = 20
    min_ms: float = 60.0
    warmup_ms: float = 20.0
    max_ms: float = float("inf")

    def rounds(self, estimates):
        """{name: rounds} for estimates {name: ms of one record}; the fastest one's count is the largest."""
        fastest = max(min(estimates.values()), 1e-6)
        most = min(MAX_ROUNDS, max(self.min_rounds, int(self.min_ms / fastest) + 1))
        counts = {
            name: most if ms <= COMPARABLE * fastest else max(FEWEST_ROUNDS, int(most * COMPARABLE * fastest / ms))
            for name, ms in estimates.items()
        }
        share = self.max_ms / sum(counts[name] * ms for name, ms in estimates.items())
        return {name: max(FEWEST_ROUNDS, int(count * min(1.0, share))) for name, count in counts.items()}


class Allowance:
    """Shares the time of a whole run among its rows: what one row leaves over, the later ones get."""

    OVERRUN = 1.2  # rows that start after this many times the allowance are skipped
    ADVANCE = 0.25  # the part of the allowance by which compilation may exceed an even share

    def __init__(self, seconds, rows):
        self.seconds, self.rows, self.started = seconds, rows, time.monotonic()

    def spent(self):
        return time.monotonic() - self.started

    def exhausted(self):
        return self.spent() > self.OVERRUN * self.seconds

    def is_late(self, index):
        """Whether row `index` starts so late that nothing should be compiled for it."""
        return self.spent() > self.seconds * (index / self.rows + self.ADVANCE)

    def budget(self, base, index):
        """The budget of row `index`, counted from 0; a row's set-up costs about as much as its measurement."""
        share = max(0.0, self.seconds - self.spent()) / max(1, self.rows - index)
        return replace(base, max_ms=max(1.0, min(base.max_ms, 500.0 * share)))


class CudaTimer:
    """Times with CUDA events; `calls` is how many calls of the implementation one recorded call makes.

    Before each call a buffer larger than the L2 cache is overwritten, so that every call starts from the same cache
    state. Where the host would be late, the device then sleeps while it enqueues the call: the events enclose device
    work only.
    """

    def __init__(self, device):
        self.device, self.calls = device, 1
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

    def lead_ms(self, host_ms, device_ms):
        """How long the device is to sleep before a call of so much host time: not at all where the calls themselves
        keep the device later than the host; twice as long as it takes, since the host is not steady."""
        return min(2 * host_ms, LONGEST_LEAD_MS) if device_ms < 2 * host_ms else 0.0

    def record(self, call, lead_ms=0.0):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.flush.zero_()
        if lead_ms > 0:
            torch.cuda._sleep(int(lead_ms * SLEEP_CYCLES_PER_MS))
        start.record()
        call()
        stop.record()
        return start, stop

    def milliseconds(self, records):
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(stop) / self.calls for start, stop in records]

    def synchronize(self):
        torch.cuda.synchronize(self.device)


class HostTimer:
    """Times with the host's monotonic clock: `calls` calls, until the device is done; the time of one is reported."""

    def __init__(self, device, calls=1):
        self.device, self.calls = device, calls

    def start_region(self):
        self.synchronize()

    def stop_region(self):
        return None

    def lead_ms(self, host_ms, device_ms):
        return 0.0

    def record(self, call, lead_ms=0.0):
        self.synchronize()
        start = time.perf_counter()
        for _ in range(self.calls):
            call()
        self.synchronize()
        return start, time.perf_counter()

    def milliseconds(self, records):
        return [(stop - start) * 1e3 / self.calls for start, stop in records]

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def make_timers(device):
    """{timing of a row: timer}."""
    if device.type != "cuda":
        return {"event": HostTimer(device), "eager": HostTimer(device)}
    events = CudaTimer(device)
    graphs = copy.copy(events)
    graphs.calls = CALLS_PER_GRAPH
    return {"event": events, "replay": events, "graph": graphs, "eager": HostTimer(device, EAGER_CALLS)}


def captured(call, context, calls=CALLS_PER_GRAPH):
    """Replays a CUDA graph of so many calls."""
    graph, side_stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with context():
        with torch.cuda.stream(side_stream):
            call()
        torch.cuda.current_stream().wait_stream(side_stream)
        with torch.cuda.graph(graph):
            for _ in range(calls):
                call()

    def replay(_keeps=call):  # the tensors alive: the graph holds no reference to them
        graph.replay()

    return replay


class SmClock:
    """Mean SM clock over a region: cycles counted by the SMs over the time of the GPU's global timer. None without
    Triton."""

    def __init__(self, device):
        self.before = None
        try:
            self.sample = make_clock_sampler(device)
            self.sample()
        except Exception:  # Triton raises its own types for a missing compiler or driver; the clock is informative only
            self.sample = None

    def start(self):
        self.before = self.sample() if self.sample else None

    def stop(self):
        return mean_clock_mhz(self.before, self.sample()) if self.sample else None


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
    from gpu_kernels import read_clocks

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
    """Runs `call` until `warmup_ms` have passed. Returns (the shortest time of one record seen, the lead that the host
    needs), in ms."""
    best, spent, of_host = float("inf"), 0.0, []
    for _ in range(MAX_ROUNDS):
        begin = time.perf_counter()
        record = timer.record(call)
        of_host.append((time.perf_counter() - begin) * 1e3)
        elapsed = timer.milliseconds([record])[0] * timer.calls
        best = min(best, elapsed)
        spent += elapsed
        if spent >= budget.warmup_ms:
            break
    return best, timer.lead_ms(statistics.median(of_host), best)


def interleave(timer, calls, budget):
    """Times `calls` ({name: (context factory, function)}) in rounds of random order.

    At the power limit a kernel is slower after one that drew more power: none may follow the same one in every round.

    Slow implementations sit some rounds out, evenly spread. The context (choice of an SDPA backend) is entered outside
    the timed region. Returns ({name: [ms, …]}, mean SM clock in MHz or None).
    """
    estimates, leads = {}, {}
    for name, (context, call) in calls.items():
        with context():
            best, leads[name] = warm_up(timer, call, budget)
            estimates[name] = best + leads[name]
    counts = budget.rounds(estimates)
    rounds = max(counts.values())
    names = list(calls)
    records = {name: [] for name in names}
    timer.start_region()
    for index in range(rounds):
        for name in random.Random(index).sample(names, len(names)):
            if index * counts[name] // rounds == (index + 1) * counts[name] // rounds:
                continue
            context, call = calls[name]
            with context():
                records[name].append(timer.record(call, leads[name]))
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
