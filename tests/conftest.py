"""Devices, seeds and command line options of the whole suite."""

from __future__ import annotations

import fcntl
import gc
import importlib
import importlib.util
import itertools
import os
import random
import zlib

import pytest
import torch
from cases import full_cases, pairwise_cases, training_cases

SEED_VARIABLE = "FLASH_ATTN_TEST_SEED"
BY_FUNCTION = "cuda_by_function"  # a value of the fixture `device` too: CUDA tensors without the autograd node in C++
GPU = ("cuda", BY_FUNCTION)
CLIENTS = ("accelerate", "diffusers", "peft", "sentence_transformers", "transformers")
# Of the extras "test" and "docs": where CI=true, a test that misses one of these fails instead of being skipped.
REQUIRED_IN_CI = (*CLIENTS, "mkdocs")
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
TRACES_ALL = (2, 11)  # the oldest torch that is known to compile every call without a break of the graph
LONGEST = ("test_host_cpp.py", "test_minimal.py")  # of programs: first, so that no process ends with one of them alone
importorskip = pytest.importorskip
gc.disable()  # until all tests are collected: what they and torch made by then stays


def import_or_skip(name, *args, **kwargs):
    if os.environ.get("CI") == "true" and name.split(".")[0] in REQUIRED_IN_CI:
        importlib.import_module(name.split(".")[0])
    return importorskip(name, *args, **kwargs)


pytest.importorskip = import_or_skip


def pytest_addoption(parser, pluginmanager):
    group = parser.getgroup("flash_attn")
    group.addoption("--device", choices=("cpu", "cuda", "all"), default="all", help="run the tests of one device only")
    group.addoption(
        "--full", action="store_true", help="every combination of features and parameters, not only pairs of them"
    )
    group.addoption("--test-seed", type=int, default=None, help=f"seed of all random inputs (or set {SEED_VARIABLE})")
    if not pluginmanager.hasplugin("xdist"):  # `make test` gives its options, and runs in one process then
        for option in ("--numprocesses", "--dist"):
            group.addoption(option, help="without effect: pytest-xdist is not there")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """One process a core, in about 1 GiB each; where a GPU is used, with 8 GiB of its memory each."""
    workers = min(len(os.sched_getaffinity(0)), 8)
    if config.getoption("--device") != "cpu" and torch.cuda.is_available():
        workers = min(workers, torch.cuda.get_device_properties(0).total_memory // (8 << 30))
    return max(workers, 1)


class FailureNames:
    """Names every failed test at once, with its reason: a run that meets a time limit never comes to its report."""

    def __init__(self, config):
        self.config = config

    def pytest_runtest_logreport(self, report):
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            seed = f"{SEED_VARIABLE}={self.config.attn_seed}"
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = crash.message.splitlines()[0] if crash and crash.message else ""
            terminal.write_line(f"\nfailed: {report.nodeid} ({report.when}; {seed}) {reason}".rstrip())


def pytest_configure(config):
    config.addinivalue_line("markers", "big: needs tens of GiB of GPU memory")
    config.addinivalue_line("markers", "by_both_paths: on cuda also with every call by FlashAttnFunc")
    config.addinivalue_line("markers", "each: on CPU tensors each value of each parameter, not every pair of values")
    config.addinivalue_line("markers", "needs_torch(version, why): the oldest torch that a test runs with")
    config.addinivalue_line("markers", "devices(*names): the devices a test runs on, when it is not all of them")
    workerinput = getattr(config, "workerinput", None)
    if workerinput is not None:
        config.attn_seed = workerinput["attn_seed"]
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start
    else:
        config.attn_seed = config.getoption("--test-seed")
        if config.attn_seed is None:
            config.attn_seed = int(os.environ.get(SEED_VARIABLE) or random.SystemRandom().randrange(2**31))
        config.pluginmanager.register(FailureNames(config))  # workers have a terminal reporter, and no terminal
    # Inductor's C++ without SIMD: it asks in each process, by programs of seconds, what the compiler and the CPU know.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
    # A dead CUDA graph of an earlier test, collected while another is captured, would end the capture.
    compiler_config = getattr(torch.compiler, "config", None)  # torch 2.4 has none
    if hasattr(compiler_config, "force_cudagraph_gc"):  # before it existed torch collected always
        compiler_config.force_cudagraph_gc = True
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or (1 if workerinput is not None else 2)))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput["attn_seed"] = node.config.attn_seed


def pytest_report_header(config):
    inputs = f"flash_attn inputs: {SEED_VARIABLE}={config.attn_seed}"
    return inputs if torch.cuda.is_available() else f"{inputs}; no GPU: tests of both devices run on the CPU alone"


def pytest_terminal_summary(terminalreporter):
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(f"repeat with the same inputs: {SEED_VARIABLE}={terminalreporter.config.attn_seed}")


def _covering(items, size):
    """Cases of one test that together hold every combination of `size` parameters' values: greedy, deterministic."""
    values = {item: sorted((name, id(value)) for name, value in item.callspec.params.items()) for item in items}
    combinations = {item: set(itertools.combinations(values[item], size)) for item in items}
    uncovered, kept = set().union(*combinations.values()), set()
    while uncovered:
        best = max(items, key=lambda item: len(combinations[item] & uncovered))
        kept.add(best)
        uncovered -= combinations[best]
    return kept


def _beyond_first_skips(items):
    """Without a GPU: the items on CUDA tensors but the first of each test, which is skipped and says why."""
    if torch.cuda.is_available():
        return set()
    on_gpu = [item for item in items if getattr(item, "callspec", None) and item.callspec.params.get("device") in GPU]
    first = {(item.path, item.originalname): item for item in reversed(on_gpu)}
    return set(on_gpu) - set(first.values())


def _drop(config, items, dropped):
    items[:] = [item for item in items if item not in dropped]
    config.hook.pytest_deselected(items=[*dropped])


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: item.path.name not in LONGEST)
    _drop(config, items, _beyond_first_skips(items))
    if config.getoption("--full"):
        return
    groups = {}
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if len(params) > 2 and params.get("device", "cpu") == "cpu":
            groups.setdefault((item.path, item.cls, item.originalname), []).append(item)
    dropped = set()
    for group in groups.values():
        family = group[0].callspec.params.get("family")  # the CPU backend has no families: the first one is enough
        of_family = [item for item in group if item.callspec.params.get("family") == family]
        dropped |= set(group) - _covering(of_family, 1 if group[0].get_closest_marker("each") else 2)
    _drop(config, items, dropped)


def pytest_runtest_setup(item):
    for marker in item.iter_markers("needs_torch"):
        version, why = marker.args
        if TORCH < version:
            pytest.skip(f"torch {torch.__version__} {why}")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call():
    try:
        return (yield)
    except Exception as error:
        if TORCH < TRACES_ALL and type(error).__module__ == "torch._dynamo.exc":
            pytest.skip(f"torch {torch.__version__} does not compile this: {str(error).splitlines()[0]}")
        raise


def _devices(metafunc) -> list[str]:
    chosen = metafunc.config.getoption("--device")
    devices = ["cpu", "cuda"] if chosen == "all" else [chosen]
    marker = metafunc.definition.get_closest_marker("devices")
    if marker is not None:
        devices = [device for device in devices if device in marker.args]
    if chosen == "all" and "cpu" in devices and not torch.cuda.is_available():
        return ["cpu"]
    return devices


def pytest_generate_tests(metafunc):
    devices = _devices(metafunc)
    if metafunc.definition.get_closest_marker("by_both_paths") is not None and "cuda" in devices:
        devices = [*devices, BY_FUNCTION]
    if "case" in metafunc.fixturenames:
        full = metafunc.config.getoption("--full")
        pairs = [(d, c) for d in devices for c in pairwise_cases(d) + (full_cases() if full else [])]
        metafunc.parametrize("device,case", pairs, ids=[f"{d}-{c.id}" for d, c in pairs], indirect=["device"])
    elif "training_case" in metafunc.fixturenames:
        pairs = [(d, c) for d in devices for c in training_cases(d)]
        metafunc.parametrize("device,training_case", pairs, ids=[f"{d}-{c.id}" for d, c in pairs], indirect=["device"])
    elif "device" in metafunc.fixturenames:
        metafunc.parametrize("device", devices, indirect=True)


@pytest.fixture
def device(request):
    """``cpu`` or ``cuda``; skips where the GPU or the CUDA extension is missing."""
    if request.param != "cpu":
        if not torch.cuda.is_available():
            pytest.skip("torch.cuda is not available")
        spec = importlib.util.find_spec("flash_attn_2_cuda")
        if spec is None or str(spec.origin).endswith(".py"):  # the stand-in of a CPU-only install
            pytest.skip("the extension flash_attn_2_cuda is not installed")
    if request.param != BY_FUNCTION:
        yield request.param
        return
    from harness import by_function

    with by_function():
        yield "cuda"


@pytest.fixture(params=("wgmma", "mma_sync"))
def family(request, device, monkeypatch):
    """Both families of CUDA kernels."""
    if request.param == "mma_sync":
        if device == "cpu":
            pytest.skip("the CPU has one backend")
        monkeypatch.setenv("FLASH_ATTN_FAMILY", "mma_sync")
    elif device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the wgmma family runs on compute capability 9.0")
    return request.param


@pytest.fixture
def hopper(device):
    """The device, where the kernels are of two families; skips where there is one only."""
    import flash_attn

    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        pytest.skip(f"the wgmma family supports compute capability 9.0 only, this GPU has {capability}")
    if "90" not in flash_attn.__build__["archs"]:
        pytest.skip(f"the wgmma family is not in this build, which has {flash_attn.__build__['archs']}")
    return device


@pytest.fixture(autouse=True)
def _one_big_test_at_a_time(request, tmp_path_factory):
    """Of all processes of a run."""
    if request.node.get_closest_marker("big") is None:
        yield
        return
    with open(tmp_path_factory.getbasetemp().parent / "big.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
        yield
        free_gpu_memory()


@pytest.fixture(autouse=True)
def _seed_everything(request):
    """Every test has its own stream, so that its inputs depend neither on the order nor on the worker."""
    seed = (request.config.attn_seed * 0x9E3779B1 + zlib.crc32(request.node.nodeid.encode())) % 2**63
    torch.manual_seed(seed)
    random.seed(seed)


@pytest.fixture(scope="module", autouse=True)
def _free_gpu_memory_after_module():
    yield
    free_gpu_memory()


def free_gpu_memory():
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
