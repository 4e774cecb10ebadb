"""Few rows over many keys, served by the kernels of the KV cache, which FLASH_ATTN_FAMILY=split_kv forces, or by
shares of the keys in the wgmma family: FLASH_ATTN_FAMILY=wgmma:3 forces three of them.
"""

from __future__ import annotations

import kernel_tables
import pytest
import torch
from cases import Case
from harness import captured, check_forward, make_problem, run
from reference import Varlen
from test_cuda_runtime import check_replays_with_changed_inputs
from test_dropout import forward_with_state

from flash_attn import flash_attn_func

pytestmark = pytest.mark.devices("cuda")

DTYPE = "bfloat16"
FEATURES = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (300, 40)},
    "softcap": {"softcap": 15.0, "causal": True},
    "alibi": {"alibi": "batch", "window": (700, -1)},
    "sinks": {"sinks": True, "causal": True},
}
SPLIT = Case(1, 1, 4096, 16, 16, 128, DTYPE)  # one that is served so without being asked for


@pytest.fixture
def run_family(monkeypatch):
    def call(problem, family, **overrides):
        with monkeypatch.context() as patch:
            patch.setenv("FLASH_ATTN_FAMILY", family)
            return run(problem, **overrides)

    return call


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("head_dim", (24, *kernel_tables.WGMMA))
@pytest.mark.parametrize("lengths", ((1, 1500), (16, 1000), (70, 300), (129, 700), (65, 33)), ids=str)
def test_accuracy(device, run_family, head_dim, lengths, features):
    """One tile of packed rows, several, and more queries than keys."""
    problem = make_problem(Case(2, *lengths, 6, 2, head_dim, DTYPE, **features), device)
    out, lse, _ = run_family(problem, "split_kv")
    check_forward(problem, out, lse)
    again = run_family(problem, "split_kv")
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize(
    "lengths", ((1, 300), (64, 64), (65, 77), (450, 450), (513, 700), (1000, 1000), (300, 290), (2047, 2047)), ids=str
)
def test_rows_from_both_ends(device, run_family, head_dim, lengths):
    """Causal calls of one wave: the warpgroups of a thread block have rows from both ends of a head and end at
    different keys; not if the first rows see none."""
    problem = make_problem(Case(1, *lengths, 6, 2, head_dim, DTYPE, causal=True), device)
    out, lse, _ = run_family(problem, "wgmma:1")
    check_forward(problem, out, lse)
    for _ in range(5):
        again = run_family(problem, "wgmma:1")
        assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("lengths", ((1, 5000), (100, 3000)), ids=str)
def test_float16_with_many_keys(device, run_family, head_dim, lengths):
    problem = make_problem(Case(1, *lengths, 8, 1, head_dim, "float16", causal=True), device)
    out, lse, _ = run_family(problem, "split_kv")
    check_forward(problem, out, lse)


LENGTHS = ((70, 300), (1, 700), (0, 40), (33, 0), (128, 257), (1, 0), (5, 1100), (1, 64))


def check_packed(device, run_family, family, page_size, kind, features):
    for head_dim, heads in ((64, (4, 2)), (128, (6, 1)), (256, (2, 2))):
        case = Case(len(LENGTHS), 0, 0, *heads, head_dim, DTYPE, kind=kind, page_size=page_size, **features)
        problem = make_problem(case, device, list(LENGTHS))
        out, lse, _ = run_family(problem, family)
        check_forward(problem, out, lse)
        again = run_family(problem, family, max_seqlen_q=1, max_seqlen_k=1)  # hints, and wrong ones
        assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("kind", ("packed", "padded", "seqused", "leftpad"))
@pytest.mark.parametrize("page_size", (0, 1, 16, 48))
def test_packed(device, run_family, page_size, kind, features):
    """Sequences without queries or keys, rows of no sequence, pages that a step straddles."""
    check_packed(device, run_family, "split_kv", page_size, kind, features)


@pytest.mark.parametrize("page_size", (0, 16))
def test_many_short_queries(device, run_family, page_size):
    """More sequences than a warp finds at once, one query each, and few with all of the keys."""
    lengths = [(1, 3 + 17 * i % 200) for i in range(90)] + [(1, 9000), (0, 50), (2, 5000)]
    case = Case(len(lengths), 0, 0, 8, 2, 64, DTYPE, kind="packed", page_size=page_size, causal=True)
    problem = make_problem(case, device, lengths)
    out, lse, _ = run_family(problem, "split_kv")
    check_forward(problem, out, lse)


def test_invalid_page_reads_as_zeros(device, run_family):
    case = Case(2, 0, 0, 4, 2, 64, DTYPE, kind="packed", page_size=16, causal=True)
    problem = make_problem(case, device, [(3, 700), (1, 40)])
    page = problem.block_table[0, 3].item()
    problem.k[page], problem.v[page] = 0, 0
    expected = run_family(problem, "split_kv")[0]
    for entry in (-1, 10**6):
        problem.block_table[0, 3] = entry
        assert torch.equal(expected, run_family(problem, "split_kv")[0])


def test_packed_decoding_takes_the_split(device, run_family):
    case = Case(4, 0, 0, 32, 8, 128, DTYPE, kind="packed", page_size=16, causal=True)
    problem = make_problem(case, device, [(1, 3000), (1, 1500), (1, 20), (1, 2000)])
    wanted, own, other = (run_family(problem, family)[0] for family in ("split_kv", "", "mma_sync"))
    assert torch.equal(own, wanted) and not torch.equal(own, other)
    for longest in (1, 10**6):
        assert torch.equal(own, run(problem, max_seqlen_q=longest, max_seqlen_k=longest)[0])


def test_unsupported_calls(device, run_family):
    """The other families take it, although this one is asked for."""
    problem = make_problem(Case(1, 3, 1200, 4, 2, 64, DTYPE, dropout=0.2), device)
    out, lse, dmask = run_family(problem, "split_kv")
    check_forward(problem, out, lse, keep=dmask >= 0)


def test_few_rows_over_many_keys(device, run_family):
    """The plan takes this family by itself, and no other one where it is not wanted."""
    problem = make_problem(SPLIT, device)
    wanted, own, other = (run_family(problem, family)[0] for family in ("split_kv", "", "mma_sync"))
    assert torch.equal(own, wanted) and not torch.equal(own, other)


def test_random_state_is_zero(device):
    assert not forward_with_state(make_problem(SPLIT, device), 0.0)[3].any()


def test_strides(device, run_family):
    """Heads before rows, and one sequence expanded to all."""
    problem = make_problem(Case(3, 5, 900, 4, 2, 128, DTYPE, causal=True), device)
    problem.q = problem.q.transpose(1, 2).contiguous().transpose(1, 2)
    problem.k, problem.v = (x[:1].expand_as(x) for x in (problem.k, problem.v))
    out, lse, _ = run_family(problem, "split_kv")
    check_forward(problem, out, lse)


def test_gradients(device, run_family, monkeypatch):
    """The backward takes up what this forward left."""
    problem = make_problem(Case(2, 16, 2000, 4, 2, 64, DTYPE, causal=True), device)
    gradients = {}
    for family in ("split_kv", "mma_sync"):
        inputs = [x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v)]
        monkeypatch.setenv("FLASH_ATTN_FAMILY", family)
        out = flash_attn_func(*inputs, causal=True)
        monkeypatch.setenv("FLASH_ATTN_FAMILY", "mma_sync")
        gradients[family] = torch.autograd.grad(out.float().square().sum(), inputs)
    for ours, plain in zip(*gradients.values()):
        assert torch.linalg.norm(ours - plain) < 0.01 * torch.linalg.norm(plain)


def test_graph(device):
    check_replays_with_changed_inputs(make_problem(SPLIT, device))


def change_lengths(problem, starts_q, starts_k):
    """Splits the same packed rows into other sequences."""
    problem.cu_seqlens_q.copy_(torch.tensor(starts_q))
    problem.cu_seqlens_k.copy_(torch.tensor(starts_k))
    lengths = [[b - a for a, b in zip(x, x[1:])] for x in (starts_q, starts_k)]
    problem.layout = Varlen(starts_q[:-1], lengths[0], starts_k[:-1], lengths[1], starts_q[-1])


def test_graph_with_changed_lengths(device, monkeypatch):
    """One graph computes every split of the same rows into sequences."""
    monkeypatch.setenv("FLASH_ATTN_FAMILY", "split_kv")
    case = Case(4, 0, 0, 4, 2, 64, DTYPE, kind="packed", causal=True)
    problem = make_problem(case, device, [(40, 600), (1, 900), (7, 100), (16, 400)])
    graph, (out, lse, _) = captured(lambda: run(problem))
    for starts_q, starts_k in (
        ([0, 40, 41, 48, 64], [0, 600, 1500, 1600, 2000]),
        ([0, 0, 60, 64, 64], [0, 9, 9, 1990, 2000]),
    ):
        change_lengths(problem, starts_q, starts_k)
        graph.replay()
        check_forward(problem, out, lse)


# ---- shares of the keys in the wgmma family ----

SHARED = Case(1, 128, 2048, 16, 16, 128, DTYPE)  # one that is served so without being asked for
SHARED_FEATURES = {
    **FEATURES,
    "capped alibi": {"softcap": 15.0, "alibi": "heads", "causal": True, "sinks": True},
    "narrow": {"window": (5, 3), "sinks": True},
}


@pytest.mark.parametrize("features", SHARED_FEATURES.values(), ids=SHARED_FEATURES)
@pytest.mark.parametrize("head_dim", (24, *kernel_tables.WGMMA))
@pytest.mark.parametrize("lengths", ((1, 1500), (129, 1000), (300, 700), (65, 33)), ids=str)
def test_shares(hopper, run_family, head_dim, lengths, features):
    """Whole blocks and parts of them, more shares than blocks, rows that see no key of a share."""
    problem = make_problem(Case(2, *lengths, 6, 2, head_dim, DTYPE, **features), hopper)
    for shares in (2, 7, 32):
        out, lse, _ = run_family(problem, f"wgmma:{shares}")
        check_forward(problem, out, lse)
        again = run_family(problem, f"wgmma:{shares}")
        assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


@pytest.mark.parametrize("features", ({}, {"head_dim_v": 128}, {"softcap": 9.0}), ids=str)
@pytest.mark.parametrize("head_dim", (64, 128, 192))
def test_shares_in_float16(hopper, run_family, head_dim, features):
    problem = make_problem(Case(3, 200, 3000, 4, 1, head_dim, "float16", causal=True, **features), hopper)
    out, lse, _ = run_family(problem, "wgmma:5")
    check_forward(problem, out, lse)


@pytest.mark.parametrize("features", SHARED_FEATURES.values(), ids=SHARED_FEATURES)
@pytest.mark.parametrize("kind", ("packed", "padded", "seqused", "leftpad"))
@pytest.mark.parametrize("page_size", (0, 1, 16, 48))
def test_shares_of_packed(hopper, run_family, page_size, kind, features):
    check_packed(hopper, run_family, "wgmma:3", page_size, kind, features)


@pytest.mark.parametrize("features", ({}, {"causal": True}, {"kind": "packed", "causal": True}), ids=str)
@pytest.mark.parametrize("head_dim", (64, 128, 256))
def test_more_shares_than_multiprocessors(hopper, run_family, head_dim, features):
    """Thread blocks take several shares, equal ones in turns and others as they get free. The same in a graph."""
    problem = make_problem(Case(2, 700, 1500, 16, 16, head_dim, DTYPE, **features), hopper)
    out, lse, _ = run_family(problem, "wgmma:9")
    check_forward(problem, out, lse)
    graph, (replayed, replayed_lse, _) = captured(lambda: run_family(problem, "wgmma:9"))
    for _ in range(3):
        replayed.zero_()
        graph.replay()
        assert torch.equal(out, replayed) and torch.equal(lse, replayed_lse)


def test_max_logit_of_shares(hopper, run_family):
    problem = make_problem(Case(2, 100, 900, 4, 2, 128, DTYPE, causal=True), hopper)
    shared, whole = (run_family(problem, f, return_max_logit=True)[3] for f in ("wgmma:4", "wgmma"))
    assert torch.equal(shared, whole)


def test_dropout_is_not_shared(hopper, run_family):
    problem = make_problem(Case(1, 100, 1200, 4, 2, 64, DTYPE, dropout=0.2), hopper)
    results = []
    for family in ("wgmma:4", "wgmma"):
        torch.manual_seed(5)
        results.append(run_family(problem, family))
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_the_plan_shares(hopper, run_family):
    """By itself, where it is wanted."""
    problem = make_problem(SHARED, hopper)
    own, whole, split = (run_family(problem, family)[0] for family in ("", "wgmma", "split_kv"))
    assert not torch.equal(own, whole) and not torch.equal(own, split)
    assert any(torch.equal(own, run_family(problem, f"wgmma:{shares}")[0]) for shares in range(2, 17))


def test_graph_of_shares(hopper):
    check_replays_with_changed_inputs(make_problem(SHARED, hopper))


def test_graph_of_shares_with_changed_lengths(hopper, monkeypatch):
    """The shares are cut anew from the lengths on the device."""
    monkeypatch.setenv("FLASH_ATTN_FAMILY", "wgmma:4")
    case = Case(4, 0, 0, 4, 2, 128, DTYPE, kind="packed", causal=True, sinks=True)
    problem = make_problem(case, hopper, [(140, 600), (1, 900), (43, 100), (16, 400)])
    graph, (out, lse, _) = captured(lambda: run(problem))
    for starts_q, starts_k in (
        ([0, 140, 141, 184, 200], [0, 600, 1500, 1600, 2000]),
        ([0, 0, 160, 164, 200], [0, 9, 9, 1990, 2000]),
    ):
        change_lengths(problem, starts_q, starts_k)
        for _ in range(2):
            graph.replay()
            check_forward(problem, out, lse)
