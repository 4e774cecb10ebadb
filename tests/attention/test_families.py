"""The kernel families of the forward against each other: wgmma, which compute capability 9.0 takes, and mma.sync.

FLASH_ATTN_FAMILY=mma_sync forces the second, wgmma and wgmma:1 the first with its kernels for many waves of row blocks
and with those for one wave; all are checked against the float64 reference, on the same inputs.
"""

from __future__ import annotations

import itertools
import os
import threading

import kernel_tables
import pytest
import torch
from cases import Case
from harness import captured, check_forward, expected, make_problem, run
from reference import assert_accurate

import flash_attn
from flash_attn import flash_attn_func, flash_attn_varlen_func

pytestmark = pytest.mark.devices("cuda")

DTYPE = "bfloat16"
FORCED = ("wgmma", "wgmma:1", "mma_sync")


@pytest.fixture
def run_family(monkeypatch):
    """run(problem) by a family, with the dropout mask that the seed gives."""

    def call(problem, family, seed=17, **overrides):
        monkeypatch.setenv("FLASH_ATTN_FAMILY", family)
        torch.manual_seed(seed)
        results = run(problem, **overrides)
        monkeypatch.delenv("FLASH_ATTN_FAMILY", raising=False)
        return results

    return call


def check_families(problem, run_family):
    """Each of them within the criterion, those with wgmma with the same bits every time."""
    case, results = problem.case, {}
    has_one_wave = not (case.dropout or case.softcap or case.alibi)  # else "wgmma:1" takes the kernel of "wgmma"
    for family in FORCED:
        if family == "wgmma:1" and not has_one_wave:
            continue
        out, lse, dmask = results[family] = run_family(problem, family)
        check_forward(problem, out, lse, keep=dmask >= 0 if case.dropout else None)
        if family != "mma_sync":
            again = run_family(problem, family)
            assert torch.equal(out, again[0]) and torch.equal(lse, again[1])
    if case.dropout and problem.layout is None:
        keeps = [result[2][:, :, : case.seqlen_q, : case.seqlen_k] >= 0 for result in results.values()]
        assert torch.equal(*keeps)


FEATURES = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (90, 40)},
    "softcap": {"softcap": 15.0, "causal": True},
    "alibi": {"alibi": "batch", "window": (200, -1)},
    "dropout": {"dropout": 0.2, "causal": True},
    "sinks": {"sinks": True, "causal": True},
    "everything": {
        "causal": True,
        "window": (150, -1),
        "softcap": 20.0,
        "alibi": "heads",
        "sinks": True,
        "dropout": 0.1,
    },
}


def test_families_are_as_many(hopper, run_family):
    """They sum in different orders, so equal bits would mean that one of them ran twice."""
    problem = make_problem(Case(2, 2048, 2048, 4, 2, 128, DTYPE), hopper)
    outs = [run_family(problem, family)[0] for family in FORCED]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(outs, 2))
    assert torch.equal(run_family(problem, "")[0], outs[1])  # 128 row blocks


@pytest.mark.parametrize("window", ((-1, -1), (-1, 0), (90, 40)), ids=str)
@pytest.mark.parametrize("head_dim", (64, 128))
def test_tiles_without_a_schedule_have_equal_bits(hopper, monkeypatch, head_dim, window):
    """Of one wave of row blocks, dense calls take the kernel without a schedule, packed ones the other."""
    problem = make_problem(Case(3, 300, 420, 8, 2, head_dim, DTYPE, window=window), hopper)
    tensors, options = (problem.q, problem.k, problem.v), {"window_size": window, "return_attn_probs": True}
    ends = [torch.arange(4, device=hopper, dtype=torch.int32) * n for n in (300, 420)]
    monkeypatch.setenv("FLASH_ATTN_FAMILY", "wgmma:1")
    out, lse, _ = flash_attn_func(*tensors, **options)
    packed = flash_attn_varlen_func(*(x.flatten(0, 1) for x in tensors), *ends, 300, 420, **options)
    assert torch.equal(out.flatten(0, 1), packed[0])
    assert torch.equal(lse, packed[1].view(8, 3, 300).transpose(0, 1))


@pytest.mark.parametrize(
    "shape", ((3, 1000, 1100, True), (3, 1000, 700, True), (2, 1700, 9, False), (2, 2000, 2000, False)), ids=str
)
def test_whole_waves(hopper, shape):
    """Two waves of row blocks: of some no row sees a key, and packed calls have the same bits."""
    batch, rows, keys, causal = shape
    problem = make_problem(Case(batch, rows, keys, 8, 2, 128, DTYPE, causal=causal), hopper)
    tensors = (problem.q, problem.k, problem.v)
    if torch.cuda.get_device_properties(hopper).multi_processor_count == 132:
        assert flash_attn.explain(*tensors, causal=causal)["forward"]["variant"] == "static"
    out, lse, _ = run(problem)
    check_forward(problem, out, lse)
    ends = [torch.arange(batch + 1, device=hopper, dtype=torch.int32) * n for n in (rows, keys)]
    flat = (x.flatten(0, 1) for x in tensors)
    packed = flash_attn_varlen_func(*flat, *ends, rows, keys, causal=causal)
    assert torch.equal(out.flatten(0, 1), packed)


@pytest.mark.parametrize("shape", ((3, 250, 64), (2, 500, 704), (4, 1000, 192), (4, 1000, 1024)), ids=str)
def test_pairs_of_thread_blocks(hopper, monkeypatch, shape):
    """One wave and two, fewer and more blocks of keys than stages; packed calls have the same bits."""
    batch, rows, keys = shape
    problem = make_problem(Case(batch, rows, keys, 8, 2, 128, DTYPE), hopper)
    tensors = (problem.q, problem.k, problem.v)
    monkeypatch.setenv("FLASH_ATTN_FAMILY", "wgmma:1" if rows < 1000 else "")
    if torch.cuda.get_device_properties(hopper).multi_processor_count == 132:
        assert flash_attn.explain(*tensors)["forward"]["cluster"] == 2
    out, lse, _ = run(problem)
    check_forward(problem, out, lse)
    ends = [torch.arange(batch + 1, device=hopper, dtype=torch.int32) * n for n in (rows, keys)]
    packed = flash_attn_varlen_func(*(x.flatten(0, 1) for x in tensors), *ends, rows, keys)
    assert torch.equal(out.flatten(0, 1), packed)


@pytest.mark.parametrize("family", FORCED)
@pytest.mark.parametrize("head_dim", kernel_tables.WGMMA)
def test_calls_wait_for_what_they_read(hopper, run_family, head_dim, family):
    """A call may start before the previous one has ended, whose output it reads, in memory that older calls read."""
    problem = make_problem(Case(1, 1200, 1200, 4, 4, head_dim, DTYPE, causal=True), hopper)
    first = problem.v

    def chain(synchronizes):
        problem.v = first
        for _ in range(8):
            problem.v = run_family(problem, family)[0]
            if synchronizes:
                torch.cuda.synchronize()
        return problem.v

    wanted = chain(True)
    assert all(torch.equal(chain(False), wanted) for _ in range(10))


@pytest.mark.parametrize("family", FORCED)
def test_calls_wait_for_their_lengths(hopper, run_family, family):
    """Kernels between the calls write them."""
    case = Case(4, 0, 0, 4, 2, 128, DTYPE, causal=True, kind="seqused")
    problem = make_problem(case, hopper, [(200, 300), (1, 100), (90, 90), (102, 221)])
    lengths = problem.seqused_k
    choices = [lengths.clone(), lengths // 2 + 1]
    wanted = []
    for choice in choices:
        problem.seqused_k = choice
        wanted.append(run_family(problem, family)[:2])
        torch.cuda.synchronize()
    problem.seqused_k = lengths
    results = []
    for _ in range(20):
        for choice in choices:
            torch.add(choice, 0, out=lengths)
            results.append(run_family(problem, family)[:2])
    assert not torch.equal(wanted[0][1], wanted[1][1])
    for i, result in enumerate(results):
        assert all(torch.equal(a, b) for a, b in zip(result, wanted[i % 2]))


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("head_dim", (8, 40, 160, *kernel_tables.NARROW))
def test_dense(hopper, run_family, head_dim, features):
    check_families(make_problem(Case(2, 333, 401, 4, 2, head_dim, DTYPE, **features), hopper), run_family)


@pytest.mark.parametrize("head_dim", kernel_tables.NARROW)
def test_float16(hopper, run_family, head_dim):
    check_families(make_problem(Case(1, 300, 300, 6, 2, head_dim, "float16", causal=True), hopper), run_family)


RISING_CASES = [(d, 0, features) for d in kernel_tables.WGMMA for features in ({}, {"causal": True})]
RISING_CASES += [(192, 128, {}), (128, 0, {"alibi": "batch", "causal": True})]
RISING_CASES += [(d, 0, {"alibi": "heads"}) for d in (64, 96, 192, 256)]
RISING_CASES += [(d, 0, {"softcap": 100.0}) for d in kernel_tables.WGMMA]
RISING_CASES += [(128, 0, {"softcap": 300.0})]  # too flat for a polynomial
RISING_CASES += [(128, 0, {"dropout": 0.1}), (128, 0, {"softcap": 100.0, "alibi": "heads"})]
RISING_CASES += [(128, 0, {"window": window}) for window in ((900, 40), (100, 30), (20, 0))]


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("growth", ("steady", "sudden", "huge"))
@pytest.mark.parametrize("head_dim, head_dim_v, features", RISING_CASES, ids=str)
def test_scores_far_above_their_reference(hopper, run_family, head_dim, head_dim_v, features, growth, dtype):
    """References rise in block after block; or in one block for some heads and rows; or by more than floats hold."""
    case = Case(2, 1100, 1300, 4, 2, head_dim, dtype, head_dim_v=head_dim_v, **features)
    problem = make_problem(case, hopper)
    if growth == "steady":
        problem.k.mul_(torch.linspace(0.1, 9.0, 1300, device=hopper)[:, None, None])
    elif growth == "sudden":
        problem.k[:, 700:703, 1].mul_(12.0)
    else:  # along one axis: products that are as large would cancel, and leave the rounding of their sums in the LSE
        problem.k[:, 700:703, 1, 0].mul_(100.0 * head_dim**0.5)
        problem.k[:, 700:703, 1, 1:] = 0.0
    check_families(problem, run_family)


@pytest.mark.parametrize("window", ((63, 0), (64, 0), (128, 0), (128, 300)), ids=str)
@pytest.mark.parametrize("head_dim, head_dim_v", ((64, 0), (96, 0), (128, 0), (192, 0), (192, 128), (256, 0)))
def test_windows_of_short_row_blocks(hopper, run_family, head_dim, head_dim_v, window):
    """Last row blocks of few rows, so that the rows of some warpgroups are far beyond the keys that are loaded."""
    for seqlen_q, seqlen_k in ((1, 192), (256, 128), (1537, 1537), (1610, 1610)):
        case = Case(1, seqlen_q, seqlen_k, 2, 1, head_dim, DTYPE, head_dim_v=head_dim_v, window=window)
        check_families(make_problem(case, hopper), run_family)


@pytest.mark.parametrize("kind", ("packed", "padded", "seqused", "leftpad"))
@pytest.mark.parametrize("features", ("full", "causal", "window", "everything"))
@pytest.mark.parametrize("head_dim", (64, 96, 128, 256))
def test_packed(hopper, run_family, head_dim, features, kind):
    """Sequences without queries, without keys, and short ones between long ones."""
    options = dict(FEATURES[features], alibi="batch") if features == "everything" else FEATURES[features]
    case = Case(7, 200, 350, 4, 2, head_dim, DTYPE, kind=kind, **options)
    check_families(make_problem(case, hopper), run_family)


# Which way a block of keys takes depends on the side of the diagonal on which it lies, on the sign of the slope, and on
# whether scores pass the reach of the softcap's polynomial or the reference.
MODIFIERS = {
    "softcap": {"softcap": 30.0},
    "alibi": {"alibi": "heads"},
    "both": {"softcap": 30.0, "alibi": "heads"},
    "softcap_dropout": {"softcap": 30.0, "dropout": 0.2},
    "alibi_dropout": {"alibi": "heads", "dropout": 0.2},
}


@pytest.mark.parametrize("mask", ({}, {"causal": True}, {"window": (400, 90)}, {"window": (-1, 500)}), ids=str)
@pytest.mark.parametrize("modifiers", MODIFIERS)
@pytest.mark.parametrize("head_dim", kernel_tables.WGMMA)
def test_score_modifiers(hopper, run_family, head_dim, modifiers, mask):
    """Slopes of both signs, rows whose scores are within the reach of the polynomial and rows beyond it."""
    for kind, seqlen_q, seqlen_k in (("dense", 900, 1300), ("dense", 1000, 300), ("leftpad", 600, 1100)):
        case = Case(3, seqlen_q, seqlen_k, 4, 2, head_dim, DTYPE, kind=kind, **MODIFIERS[modifiers], **mask)
        problem = make_problem(case, hopper)
        rows = problem.q.flatten(0, -3)
        rows[len(rows) // 3 :] *= 4
        if problem.alibi_slopes is not None:
            problem.alibi_slopes.copy_(torch.tensor([0.7, 0.004, -0.02, 0.0]))
        check_families(problem, run_family)


@pytest.mark.parametrize("page_size", (1, 8, 16, 48, 256))
@pytest.mark.parametrize("kind", ("packed", "seqused", "leftpad"))
@pytest.mark.parametrize("head_dim", (24, 40, *kernel_tables.WGMMA))
def test_pages(hopper, run_family, head_dim, kind, page_size):
    """Every key block ends in the middle of a page, or a page in the middle of it. What no key uses is NaN."""
    features = FEATURES["everything"] if page_size == 48 else {"causal": page_size == 16}
    case = Case(7, 200, 350, 4, 2, head_dim, DTYPE, kind=kind, page_size=page_size, **features)
    check_families(make_problem(case, hopper), run_family)


@pytest.mark.parametrize("head_dim", (64, 128))
def test_many_pages(hopper, run_family, head_dim):
    """More row blocks than multiprocessors and more blocks of keys than buffers."""
    case = Case(9, 1300, 2100, 16, 4, head_dim, DTYPE, causal=True, kind="seqused", page_size=16)
    check_families(make_problem(case, hopper), run_family)


@pytest.mark.parametrize("head_dim", (64, 128, 192))
@pytest.mark.parametrize(
    "seqlen_q, seqlen_k", [(1, 1), (1, 1500), (64, 129), (65, 127), (129, 64), (193, 20), (500, 0)]
)
def test_lengths(hopper, run_family, head_dim, seqlen_q, seqlen_k):
    """One row, rows of one warpgroup only, more queries than keys (rows without keys), no key."""
    for causal in (False, True):
        case = Case(2, seqlen_q, seqlen_k, 4, 1, head_dim, DTYPE, causal=causal)
        check_families(make_problem(case, hopper), run_family)


# More row blocks than multiprocessors, so that thread blocks take several: by the counter where the mask or the lengths
# make them uneven and at head dim 128, else in equal shares. 192 rows a tile at head dim 64 need more than 1024 rows.
# Up to 32 packed sequences are sorted by their keys, more are not.
LARGE = {
    "full": Case(2, 1500, 1500, 16, 4, 128, DTYPE),
    "causal": Case(4, 1000, 1000, 16, 4, 128, DTYPE, causal=True),
    "causal64": Case(2, 1700, 1700, 16, 4, 64, DTYPE, causal=True),
    "full64": Case(2, 1700, 1700, 16, 16, 64, DTYPE),
    "causal_long": Case(1, 4500, 4500, 8, 4, 128, DTYPE, causal=True),  # 192 rows a tile at head dim 128 too
    "window256": Case(3, 900, 1100, 12, 12, 256, DTYPE, window=(300, 100)),
    "causal192": Case(3, 900, 900, 12, 12, 192, DTYPE, causal=True),
    "dropout": Case(2, 900, 900, 16, 16, 64, DTYPE, causal=True, dropout=0.15),
    "softcap": Case(4, 1000, 1000, 16, 4, 128, DTYPE, causal=True, softcap=30.0),
    "softcap256": Case(3, 900, 1100, 12, 12, 256, DTYPE, causal=True, softcap=50.0),
    "alibi": Case(4, 1000, 1000, 16, 4, 128, DTYPE, causal=True, alibi="heads"),
    "alibi64": Case(2, 1700, 1700, 16, 4, 64, DTYPE, window=(300, 100), alibi="batch"),
    "packed": Case(9, 700, 900, 16, 4, 128, DTYPE, causal=True, kind="packed"),
    "packed_many": Case(40, 300, 350, 8, 4, 128, DTYPE, causal=True, kind="padded"),
    "packed64": Case(9, 1400, 1500, 16, 4, 64, DTYPE, kind="padded"),
    "pages32": Case(9, 700, 900, 16, 4, 32, "float16", causal=True, kind="packed", page_size=16),
}


@pytest.mark.parametrize("name", LARGE)
def test_more_row_blocks_than_multiprocessors(hopper, run_family, name):
    check_families(make_problem(LARGE[name], hopper), run_family)


@pytest.mark.parametrize("name", ("full", "causal", "packed", "packed_many"))
def test_launches_in_a_row(hopper, name):
    """Every launch leaves the counter as the next one wants it, other grids in between included."""
    problem, other = (make_problem(case, hopper) for case in (LARGE[name], LARGE["causal64"]))
    wanted, wanted_other = run(problem)[:2], run(other)[:2]
    for _ in range(5):
        for expected_results, results in ((wanted, run(problem)), (wanted_other, run(other))):
            assert all(torch.equal(a, b) for a, b in zip(expected_results, results))
    check_forward(problem, *wanted)


@pytest.mark.parametrize("name", ("full", "causal", "packed"))
def test_two_streams_at_once(hopper, name):
    problem = make_problem(LARGE[name], hopper)
    wanted = run(problem)[:2]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    results = []
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(run(problem)[:2])
    torch.cuda.synchronize()
    assert len(results) == 20 and all(torch.equal(a, b) for pair in results for a, b in zip(wanted, pair))


@pytest.mark.parametrize("name", ("causal", "packed", "full64", "pages32"))
def test_graph_replay_after_eager_calls(hopper, name):
    problem = make_problem(LARGE[name], hopper)
    wanted = run(problem)[:2]
    graph, (out, lse, _) = captured(lambda: run(problem))
    for _ in range(3):
        out.zero_()
        lse.zero_()
        graph.replay()
        assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])
        eager = run(problem)[:2]
        assert all(torch.equal(a, b) for a, b in zip(wanted, eager))


@pytest.mark.parametrize("causal", (False, True))
def test_two_graphs_at_once(hopper, causal):
    """Each has a separate counter."""
    problem = make_problem(Case(9, 700, 900, 16, 4, 128, DTYPE, causal=causal, kind="packed"), hopper)
    wanted = run(problem)[:2]
    graphs = [captured(lambda: run(problem)) for _ in range(2)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(5):
        for (graph, _), stream in zip(graphs, streams):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for _, results in graphs:
        assert all(torch.equal(a, b) for a, b in zip(wanted, results))


@pytest.mark.parametrize("head_dim, head_dim_v", [(64, 0), (96, 0), (128, 0), (192, 0), (192, 128), (256, 0)])
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("value", (float("nan"), float("inf")))
def test_neighbouring_sequences_never_leak(hopper, run_family, head_dim, head_dim_v, causal, value):
    """Loads and stores are clipped at the ends of the sequence, although all of them have one tensor map."""
    lengths = [(70, 90), (150, 201), (1, 64), (129, 130), (33, 40)]
    case = Case(5, 0, 0, 4, 2, head_dim, DTYPE, causal=causal, kind="packed", head_dim_v=head_dim_v)
    problem = make_problem(case, hopper, lengths)
    layout = problem.layout
    poisoned = torch.zeros(problem.q.shape[0], dtype=torch.bool, device=hopper)
    for i in (0, 2, 4):
        rows = slice(layout.starts_q[i], layout.starts_q[i] + layout.lens_q[i])
        keys = slice(layout.starts_k[i], layout.starts_k[i] + layout.lens_k[i])
        poisoned[rows] = True
        problem.q[rows] = value
        problem.k[keys] = value
        problem.v[keys] = value
    exact, plain = expected(problem), expected(problem, problem.q.dtype)
    for family in FORCED:
        out, lse, _ = run_family(problem, family)
        assert_accurate(out[~poisoned], exact.out[~poisoned], plain.out[~poisoned], "out")
        assert_accurate(lse[:, ~poisoned], exact.lse[:, ~poisoned], plain.lse[:, ~poisoned], "lse")


@pytest.mark.parametrize("layout", ("expanded batch", "expanded heads", "heads first", "every second row"))
def test_strides(hopper, run_family, layout):
    """What a tensor map cannot describe is served by the other family."""
    problem = make_problem(Case(3, 200, 333, 4, 4, 128, DTYPE, causal=True), hopper)
    change = {
        "expanded batch": lambda x: x[:1].expand_as(x),
        "expanded heads": lambda x: x[:, :, :1].expand_as(x),
        "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "every second row": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    }[layout]
    problem.q, problem.k, problem.v = (change(x) for x in (problem.q, problem.k, problem.v))
    check_families(problem, run_family)


def test_environment_that_changes_during_calls(device):
    """os.environ moves and frees the environment while other threads' calls run without the GIL."""
    q = torch.randn(1, 64, 2, 64, device=device, dtype=torch.bfloat16)
    expected = flash_attn_func(q, q, q)
    names = [f"FLASH_ATTN_TEST_{i}" for i in range(2000)]
    done = threading.Event()

    def change():
        while not done.is_set():
            for i, name in enumerate(names):
                os.environ[name] = "x" * (1 + i % 300)
            for name in names:
                del os.environ[name]

    thread = threading.Thread(target=change)
    thread.start()
    try:
        results = [flash_attn_func(q, q, q) for _ in range(2000)]
    finally:
        done.set()
        thread.join()
    assert all(torch.equal(out, expected) for out in results)
