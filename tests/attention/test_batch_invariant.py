"""The bits of a sequence: equal in a dense batch and packed, and with batch_invariant=True in every batch."""

from __future__ import annotations

import asyncio
import functools
import os
import runpy
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import fresh_process
import kernel_tables
import pytest
import torch
import torch.utils.checkpoint
from cases import pairwise
from harness import by_function

import flash_attn
from flash_attn import (
    KvCachePlan,
    backends,
    batch_invariance,
    flash_attn_func,
    flash_attn_interface,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    is_batch_invariant,
    set_batch_invariant,
)

LENGTHS = ((1, 1), (17, 17), (128, 128), (129, 129), (300, 300), (1, 600), (33, 700), (200, 73))
LONG_LENGTHS = ((1024, 1024), (2048, 2048), (1, 5000), (64, 4096), (700, 3000))
FEATURES = {
    "head_dim": (*kernel_tables.NARROW, 40),
    "lengths": LENGTHS,
    "heads": ((2, 2), (4, 2), (8, 1)),
    "batch": (1, 3, 6),
    "dtype": ("bfloat16", "float16"),
    "causal": (False, True),
    "window": ((-1, -1), (300, 0), (70, 40), (0, -1)),
    "softcap": (0.0, 15.0),
    "alibi": (False, True),
    "sinks": (False, True),
    "dropout": (0.0, 0.2),
    "head_dim_v": (0, 128),
}
ROWS = pairwise(FEATURES)
# Where the choice turns: one wave of row blocks and more, split keys, short and long row blocks.
GPU_ROWS = pairwise({**FEATURES, "lengths": LONG_LENGTHS, "heads": ((2, 2), (16, 4), (40, 40)), "batch": (1, 2, 7, 19)})
FAMILIES = ("", "mma_sync", "wgmma", "wgmma:1", "wgmma:3", "split_kv")


def case_id(row):
    return "-".join(str(value).replace(" ", "") for value in row.values())


class Batch:
    """Sequences of one length, with the options of a row of FEATURES."""

    def __init__(self, row, device):
        dtype, (heads, heads_k), (sq, sk) = getattr(torch, row["dtype"]), row["heads"], row["lengths"]
        self.batch, self.sq, self.sk, head_dim = row["batch"], sq, sk, row["head_dim"]

        def tensor(*shape):
            return torch.randn(self.batch, *shape, device=device, dtype=dtype)

        self.q, self.k = tensor(sq, heads, head_dim), tensor(sk, heads_k, head_dim)
        self.v = tensor(sk, heads_k, row["head_dim_v"] or head_dim)
        self.dout, self.dlse = tensor(sq, heads, self.v.shape[-1]), tensor(heads, sq).float()
        self.seed, self.dropout = 31, row["dropout"]
        self.options = {
            "causal": row["causal"], "window_size": row["window"], "softcap": row["softcap"],
            "alibi_slopes": torch.rand(self.batch, heads, device=device) * 0.3 if row["alibi"] else None,
            "sinks": torch.randn(heads, device=device) if row["sinks"] else None,
            "dropout_p": row["dropout"], "deterministic": True, "return_attn_probs": True,
        }  # fmt: skip

    def dense(self, **options):
        """out, LSE (heads, rows), dq, dk, dv with the rows of all sequences in line."""
        leaves = [x.clone().requires_grad_() for x in (self.q, self.k, self.v)]
        torch.manual_seed(self.seed)
        out, lse, _ = flash_attn_func(*leaves, **{**self.options, **options})
        grads = torch.autograd.grad((out, lse), leaves, (self.dout, self.dlse))
        return [out.flatten(0, 1), in_line(lse), *(x.flatten(0, 1) for x in grads)]

    def packed(self, **options):
        leaves = [x.flatten(0, 1).clone().requires_grad_() for x in (self.q, self.k, self.v)]
        starts = [torch.arange(self.batch + 1, device=self.q.device, dtype=torch.int32) * n for n in (self.sq, self.sk)]
        longest = (self.sq, self.sk) if self.dropout else (1, 10**6)  # else they are hints, and wrong ones
        torch.manual_seed(self.seed)
        out, lse, _ = flash_attn_varlen_func(*leaves, *starts, *longest, **{**self.options, **options})
        return [out, lse, *torch.autograd.grad((out, lse), leaves, (self.dout.flatten(0, 1), in_line(self.dlse)))]


def in_line(lse):
    return lse.transpose(0, 1).flatten(1)


def assert_equal(actual, expected, names=("out", "lse", "dq", "dk", "dv")):
    for name, a, b in zip(names, actual, expected, strict=True):
        assert torch.equal(a, b), f"{name}: {(a != b).sum().item()} of {a.numel()} elements differ"


# ---- a dense batch and the same sequences packed ----


@pytest.mark.parametrize("row", ROWS, ids=case_id)
def test_dense_equals_packed_where_invariant(device, row):
    batch = Batch(row, device)
    assert_equal(batch.packed(batch_invariant=True), batch.dense(batch_invariant=True))


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("row", [*ROWS, *GPU_ROWS], ids=case_id)
def test_dense_equals_packed(device, row):
    batch = Batch(row, device)
    assert_equal(batch.packed(), batch.dense())


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("row", GPU_ROWS, ids=case_id)
def test_long_dense_equals_packed_where_invariant(device, row):
    batch = Batch(row, device)
    assert_equal(batch.packed(batch_invariant=True), batch.dense(batch_invariant=True))


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", ((1, 5000), (3, 600), (100, 2000), (513, 513), (1500, 1500)), ids=str)
@pytest.mark.parametrize("head_dim", (64, 128, 256))
def test_dense_equals_packed_in_each_family(device, monkeypatch, family, lengths, head_dim):
    """Every family, also where it is not the choice; batches of a power of two and others cut keys elsewhere."""
    monkeypatch.setenv("FLASH_ATTN_FAMILY", family)
    first = {name: values[0] for name, values in FEATURES.items()}
    for batch, heads, causal, softcap in ((1, (16, 16), False, 0.0), (2, (32, 8), True, 0.0), (7, (5, 1), True, 9.0)):
        row = {**first, "head_dim": head_dim, "lengths": lengths, "heads": heads, "batch": batch, "causal": causal}
        problem = Batch({**row, "softcap": softcap}, device)
        for invariant in (False, True):
            packed, dense = (call(batch_invariant=invariant) for call in (problem.packed, problem.dense))
            assert_equal(packed, dense)


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("row", GPU_ROWS[::3], ids=case_id)
def test_keys_and_values_without_deterministic(device, row):
    """dq has the order in which thread blocks come; everything else is as it is with deterministic=True."""
    batch = Batch(row, device)
    wanted = batch.dense()
    for results in (batch.dense(deterministic=False), batch.packed(deterministic=False)):
        names = ("out", "lse", "dk", "dv")
        assert_equal([*results[:2], *results[3:]], [*wanted[:2], *wanted[3:]], names)


# ---- whatever else is in the batch ----


INVARIANT_OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (90, 20)},
    "causal window": {"window_size": (200, -1), "causal": True},
    "softcap": {"softcap": 9.0, "causal": True},
    "alibi": {"alibi": True},
    "sinks": {"sinks": True, "causal": True},
}
OTHERS = ((300, 300), (1, 50), (0, 20), (64, 0), (257, 129), (5, 5))


class Sequence:
    """A sequence and the result of its call, alone or with others."""

    def __init__(self, device, lengths, heads, head_dim, options, dtype=torch.bfloat16):
        self.device, self.lengths, self.heads, self.head_dim, self.dtype = device, lengths, heads, head_dim, dtype
        self.options = {name: value for name, value in options.items() if name not in ("alibi", "sinks")}
        if options.get("alibi"):
            self.options["alibi_slopes"] = torch.rand(heads[0], device=device) * 0.3
        if options.get("sinks"):
            self.options["sinks"] = torch.randn(heads[0], device=device)
        self.tensors = self.random(*lengths)

    def random(self, sq, sk):
        """q, k, v, dout and dlse."""
        shapes = ((sq, self.heads[0]), (sk, self.heads[1]), (sk, self.heads[1]), (sq, self.heads[0]))
        tensors = [torch.randn(*shape, self.head_dim, device=self.device, dtype=self.dtype) for shape in shapes]
        return [*tensors, torch.randn(self.heads[0], sq, device=self.device)]

    def call(self, function, tensors, *layout):
        leaves = [x.clone().requires_grad_() for x in tensors[:3]]
        out, lse, _ = function(
            *leaves, *layout, deterministic=True, return_attn_probs=True, batch_invariant=True, **self.options
        )
        return [out, lse, *torch.autograd.grad((out, lse), leaves, tensors[3:])]

    def dense(self, batch, place):
        """Out, LSE and gradients of the sequence at a place of a dense batch."""
        parts = [self.random(*self.lengths) for _ in range(batch)]
        parts[place] = self.tensors
        results = self.call(flash_attn_func, [torch.stack(x) for x in zip(*parts)])
        return [x[place] for x in results]

    def packed(self, before=(), after=(), padding=0, fill=None):
        """The same among packed sequences of other lengths. fill: the value of all that is not the sequence's."""
        parts = [self.random(*lengths) for lengths in (*before, *after)]
        if padding:
            parts.append(self.random(padding, 2 * padding))
        for x in (tensor for part in parts for tensor in part[:3] if fill is not None):
            x.fill_(fill)
        parts.insert(len(before), self.tensors)
        tensors = [torch.cat(x, 1 if x[0].dim() == 2 else 0) for x in zip(*parts)]
        sequences = (*before, self.lengths, *after)
        starts = [torch.tensor([0, *n], device=self.device).cumsum(0).int() for n in zip(*sequences)]
        longest = [max(n) for n in zip(*sequences)]
        out, lse, *grads = self.call(flash_attn_varlen_func, tensors, *starts, *longest)
        (q0, q1), (k0, k1) = (start[len(before) : len(before) + 2].tolist() for start in starts)
        return [out[q0:q1], lse[:, q0:q1], grads[0][q0:q1], grads[1][k0:k1], grads[2][k0:k1]]


def check_sequence(sequence, batches):
    alone = sequence.dense(1, 0)
    assert_equal(sequence.packed(), alone)
    for batch, place in batches:
        assert_equal(sequence.dense(batch, place), alone)
    for before, after in (((), OTHERS), (OTHERS, ()), (OTHERS[:3], OTHERS[3:])):
        assert_equal(sequence.packed(before, after), alone)
        assert_equal(sequence.packed(before, after, padding=37, fill=float("nan")), alone)
    assert_equal(sequence.packed(padding=200), alone)


@pytest.mark.each
@pytest.mark.parametrize("options", INVARIANT_OPTIONS.values(), ids=INVARIANT_OPTIONS)
@pytest.mark.parametrize("lengths", ((1, 1), (1, 300), (17, 17), (129, 129), (130, 260), (200, 73)), ids=str)
@pytest.mark.parametrize("heads", ((4, 2, 64), (2, 2, 128), (3, 1, 40)), ids=str)
def test_the_batch_does_not_matter(device, heads, lengths, options):
    """heads: of Q, of K and V, head dim."""
    check_sequence(Sequence(device, lengths, heads[:2], heads[2], options), ((5, 3),))


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("options", INVARIANT_OPTIONS.values(), ids=INVARIANT_OPTIONS)
@pytest.mark.parametrize("lengths", ((1, 4000), (500, 500), (2048, 2048), (300, 3000)), ids=str)
@pytest.mark.parametrize("head_dim", kernel_tables.NARROW)
def test_the_batch_does_not_matter_at_length(device, head_dim, lengths, options):
    """From a part of one wave of row blocks to many of them."""
    check_sequence(Sequence(device, lengths, (8, 4), head_dim, options, torch.float16), ((2, 1), (40, 39)))


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("family", ("mma_sync", "wgmma", "split_kv"))
@pytest.mark.parametrize("head_dim", (64, 128))
def test_the_batch_does_not_matter_in_each_family(device, monkeypatch, head_dim, family):
    monkeypatch.setenv("FLASH_ATTN_FAMILY", family)
    for lengths in ((1, 2000), (700, 700)):
        check_sequence(Sequence(device, lengths, (4, 2), head_dim, {"causal": True}), ((3, 1), (50, 7)))


@pytest.mark.devices("cuda")
def test_many_sequences(device):
    """More of them than the order of packed row blocks holds."""
    many = OTHERS * 20
    sequence = Sequence(device, (300, 300), (4, 2), 128, {"causal": True})
    alone = sequence.dense(1, 0)
    for place in (0, 31, 60, len(many)):
        assert_equal(sequence.packed(many[:place], many[place:]), alone)


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("head_dim", (64, 128, 256))
def test_the_number_of_heads_does_not_matter(device, head_dim):
    """A shard of the heads equals its part of the whole."""
    whole = Sequence(device, (500, 900), (16, 4), head_dim, {"causal": True})
    expected = whole.dense(1, 0)
    part = Sequence(device, whole.lengths, (8, 2), head_dim, {"causal": True})
    for first in (0, 1):
        q, k, v, dout, dlse = whole.tensors
        rows, keys = slice(8 * first, 8 * first + 8), slice(2 * first, 2 * first + 2)
        part.tensors = [q[:, rows], k[:, keys], v[:, keys], dout[:, rows], dlse[rows]]
        out, lse, dq, dk, dv = expected
        assert_equal(part.dense(1, 0), [out[:, rows], lse[rows], dq[:, rows], dk[:, keys], dv[:, keys]])


@pytest.mark.parametrize("page_size", (16, 256))
def test_pages_among_other_pages(device, page_size):
    """Paged keys: alone, and among requests of other lengths whose pages lie between."""
    torch.manual_seed(7)
    lengths = ((40, 300), (1, 700), (130, 130), (64, 5))
    q = [torch.randn(n, 4, 64, device=device, dtype=torch.bfloat16) for n, _ in lengths]
    pages = [-(-n // page_size) for _, n in lengths]
    order = torch.randperm(sum(pages))
    k, v = torch.randn(2, sum(pages), page_size, 2, 64, device=device, dtype=torch.bfloat16).unbind()
    tables, taken = [], 0
    for count in pages:
        tables.append(order[taken : taken + count].int())
        taken += count

    def call(chosen):
        starts = [
            torch.tensor([0, *(lengths[i][axis] for i in chosen)], device=device).cumsum(0).int() for axis in (0, 1)
        ]
        width = max(pages[i] for i in chosen) + len(chosen)
        table = torch.stack([torch.cat([tables[i], -torch.ones(width - pages[i]).int()]) for i in chosen]).to(device)
        out, lse, _ = flash_attn_varlen_func(
            torch.cat([q[i] for i in chosen]), k, v, *starts, 1, 1, causal=True, block_table=table,
            return_attn_probs=True, batch_invariant=True,
        )  # fmt: skip
        rows = [lengths[i][0] for i in chosen]
        return list(zip(out.split(rows), lse.split(rows, 1)))

    together = call([2, 0, 3, 1])
    for place, i in enumerate([2, 0, 3, 1]):
        assert_equal(together[place], call([i])[0], ("out", "lse"))


# ---- a model ----


class Block(torch.nn.Module):
    """A layer of a transformer on rows (rows, width); attend(q, k, v) knows the sequences."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))

    def forward(self, x, attend):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(1)
        x = x + self.out(attend(q, k, v).flatten(1))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norms[1](x))))


@pytest.mark.parametrize("lengths", ((4, 200), (2, 500), (1, 129)), ids=str)
@pytest.mark.parametrize("causal", (False, True))
def test_a_transformer_over_dense_and_packed_batches(device, lengths, causal):
    """A bfloat16 rounding of one layer becomes most of a percent in four."""
    (batch, n), heads, width = lengths, 4, 256
    model = torch.nn.ModuleList(Block(width, heads) for _ in range(4)).to(device, torch.bfloat16)
    x = torch.randn(batch * n, width, device=device, dtype=torch.bfloat16)
    starts = torch.arange(batch + 1, device=device, dtype=torch.int32) * n
    options = {"causal": causal, "batch_invariant": device == "cpu"}

    def dense(*qkv):
        return flash_attn_func(*(x.unflatten(0, (batch, n)) for x in qkv), **options).flatten(0, 1)

    def packed(*qkv):
        return flash_attn_varlen_func(*qkv, starts, starts, n, n, **options)

    results = []
    for attend in (dense, packed):
        y = x
        with torch.no_grad():
            for block in model:
                y = block(y, attend)
        results.append(y)
    assert torch.isfinite(results[0]).all()
    assert torch.equal(*results)


# ---- the switch ----


@pytest.fixture
def modes(device, monkeypatch):
    """batch_invariant of the calls that reach the backend, by function."""
    seen, backend = [], backends.get(device)

    def spy(name, real, *args, **named):
        seen.append((name, args[-1]))
        return real(*args, **named)

    for name in ("fwd", "varlen_fwd", "bwd", "varlen_bwd", "fwd_kvcache"):
        monkeypatch.setattr(backend, name, functools.partial(spy, name, getattr(backend, name)))
    with by_function():
        yield seen
    set_batch_invariant(False)


def inputs(device, grad=False):
    return [torch.randn(2, 5, 2, 16, device=device, dtype=torch.float16, requires_grad=grad) for _ in range(3)]


def test_the_switch(device, modes):
    q, k, v = inputs(device)
    starts = torch.tensor([0, 4, 10], device=device, dtype=torch.int32)

    def call(**options):
        modes.clear()
        flash_attn_func(q, k, v, **options)
        flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), starts, starts, 6, 6, **options)
        flash_attn_with_kvcache(q, k, v, **options)
        flash_attn_interface._flash_attn_forward(q, k, v, 0.0, 0.25, False, -1, -1, 0.0, None, False)
        assert [name for name, _ in modes] == ["fwd", "varlen_fwd", "fwd_kvcache", "fwd"]
        return [mode for _, mode in modes]

    assert not is_batch_invariant() and call() == [False] * 4
    assert call(batch_invariant=True) == [True] * 3 + [False]
    with set_batch_invariant(True):
        assert is_batch_invariant() and call() == [True] * 4 and call(batch_invariant=False) == [True] * 4
        with set_batch_invariant(False):
            assert call() == [False] * 4
        assert call() == [True] * 4
    assert not is_batch_invariant()
    set_batch_invariant(True)
    assert call() == [True] * 4
    set_batch_invariant(False)
    assert call() == [False] * 4
    with pytest.raises(TypeError, match="^enabled: expected a bool, got str$"):
        set_batch_invariant("no")


def test_the_block_ends_with_an_error(device, modes):
    with pytest.raises(KeyError), set_batch_invariant(True):
        raise KeyError
    assert not is_batch_invariant()


def test_a_backward_is_what_its_forward_was(device, modes):
    starts = torch.tensor([0, 4, 10], device=device, dtype=torch.int32)
    for packed in (False, True):
        tensors = inputs(device, grad=True)
        with set_batch_invariant(True):
            out = (
                flash_attn_varlen_func(*(x.flatten(0, 1) for x in tensors), starts, starts, 6, 6)
                if packed
                else flash_attn_func(*tensors)
            )
        modes.clear()
        out.sum().backward()
        assert modes == [("varlen_bwd" if packed else "bwd", True)]
        modes.clear()
        flash_attn_func(*tensors).sum().backward()
        assert modes == [("fwd", False), ("bwd", False)]


def test_the_switch_under_compile(device, modes):
    """A change of it is seen by code that was compiled before."""
    tensors = inputs(device, grad=True)
    torch._dynamo.reset()
    function = torch.compile(lambda *x: flash_attn_func(*x, causal=True), backend="aot_eager")
    for enabled in (False, True, False):
        with set_batch_invariant(enabled):
            modes.clear()
            function(*tensors).sum().backward()
            assert modes == [("fwd", enabled), ("bwd", enabled)]


def in_thread(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(60)


def test_blocks_of_two_threads_do_not_mix(device, modes):
    """They overlap, in both orders of their ends; a third thread is in no block."""
    steps = threading.Barrier(2, timeout=60)
    inside = threading.Event()

    def block(ends_first):
        with set_batch_invariant(True):
            steps.wait()
            if ends_first:
                inside.wait(60)
            seen = is_batch_invariant(), in_thread(is_batch_invariant)
        inside.set()
        steps.wait()
        return (*seen, is_batch_invariant())

    for order in ((True, False), (False, True)):
        inside.clear()
        with ThreadPoolExecutor(2) as pool:
            assert [*pool.map(block, order)] == [(True, False, False)] * 2
        assert not is_batch_invariant()


def test_blocks_are_never_seen_by_other_threads(device, modes):
    """Nor between the call of `set_batch_invariant` and the begin of its block; a block of False hides nothing."""
    ended = threading.Event()

    def blocks(enabled):
        while not ended.is_set():
            with set_batch_invariant(enabled):
                assert is_batch_invariant() is enabled

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for enabled in (True, False):
            set_batch_invariant(not enabled)
            ended.clear()
            with ThreadPoolExecutor(1) as pool:
                other = pool.submit(blocks, enabled)
                seen = {is_batch_invariant() for _ in range(20000)}
                ended.set()
                other.result(60)
            assert seen == {not enabled}
    finally:
        sys.setswitchinterval(interval)


def test_one_object_is_entered_many_times(device, modes):
    for kept in (True, False):
        mode = set_batch_invariant(kept)
        set_batch_invariant(not kept)
        for _ in range(2):
            with mode:
                assert is_batch_invariant() is kept
                with mode, set_batch_invariant(not kept), mode:
                    assert is_batch_invariant() is kept
                assert is_batch_invariant() is kept
            assert is_batch_invariant() is not kept


def test_calls_hold_for_all_threads(device, modes):
    """Those that run already too, but in their blocks. An object that is kept is one of its thread's."""
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(is_batch_invariant).result(60) is False
        pool.submit(set_batch_invariant(False).__enter__).result(60)
        set_batch_invariant(True)
        assert is_batch_invariant() and in_thread(is_batch_invariant)
        assert pool.submit(is_batch_invariant).result(60) is False
        in_thread(lambda: set_batch_invariant(False) and None)
        assert not is_batch_invariant()
        pool.submit(set_batch_invariant(False).__exit__).result(60)
    mode = set_batch_invariant(True)
    assert is_batch_invariant() and not in_thread(is_batch_invariant)
    with mode:
        pass
    assert not is_batch_invariant()
    mode = set_batch_invariant(True)
    del mode
    assert in_thread(is_batch_invariant)


def test_tasks_have_their_own_blocks(device, modes):
    async def task(enabled, first):
        await asyncio.sleep(0.0 if first else 0.01)
        with set_batch_invariant(enabled):
            await asyncio.sleep(0.02)  # the other one is in its block, which ends later
            seen = is_batch_invariant(), await asyncio.create_task(asyncio.to_thread(is_batch_invariant))
        await asyncio.sleep(0.02)
        return (*seen, is_batch_invariant())

    async def both():
        return await asyncio.gather(task(True, True), task(False, False), asyncio.to_thread(is_batch_invariant))

    assert asyncio.run(both()) == [(True, True, False), (False, False, False), False]


def test_compiled_code_sees_the_block_of_its_thread(device, modes):
    tensors = inputs(device)
    torch._dynamo.reset()
    function = torch.compile(lambda *x: flash_attn_func(*x, causal=True), backend="aot_eager", fullgraph=True)

    def call():
        modes.clear()
        function(*tensors)
        return [mode for _, mode in modes]

    for _ in range(2):
        with set_batch_invariant(True):
            assert call() == [True]
            assert in_thread(call) == [False]
        assert call() == [False]

    async def task(enabled):
        with set_batch_invariant(enabled):
            await asyncio.sleep(0.01)
            return call()

    async def both():
        return await asyncio.gather(task(True), task(False))

    assert asyncio.run(both()) == [[True], [False]]


@pytest.mark.parametrize("use_reentrant", (False, True))
def test_checkpoints_are_recomputed_in_the_block(device, modes, use_reentrant):
    q, k, v = inputs(device, grad=True)
    with set_batch_invariant(True):
        out = torch.utils.checkpoint.checkpoint(flash_attn_func, q, k, v, use_reentrant=use_reentrant)
        out.sum().backward()
    assert modes == [("fwd", True), ("fwd", True), ("bwd", True)]


def test_plans_follow_the_switch(device, modes):
    q, k, v = inputs(device)
    lengths = torch.tensor([3, 5], device=device, dtype=torch.int32)
    sizes = (5, 2, 2, 16, 5)
    free = KvCachePlan(lengths, *sizes)
    with set_batch_invariant(True):
        plan = KvCachePlan(lengths, *sizes)
        assert plan.batch_invariant and not free.batch_invariant
        flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, plan=plan)
        with pytest.raises(RuntimeError, match="^plan: expected one made for batch_invariant True, got one for False$"):
            flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, plan=free)
    assert modes == [("fwd_kvcache", True)]


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("value,enabled", ((None, False), ("", False), ("0", False), ("1", True)))
def test_the_environment_turns_it_on(device, monkeypatch, value, enabled):
    """As it is when the module is loaded, here once more next to the one in use."""
    monkeypatch.delenv("FLASH_ATTN_BATCH_INVARIANT", raising=False)
    if value is not None:
        monkeypatch.setenv("FLASH_ATTN_BATCH_INVARIANT", value)
    loaded = runpy.run_path(batch_invariance.__file__)
    assert loaded["is_batch_invariant"]() is enabled
    assert {"is_batch_invariant", "set_batch_invariant"} <= set(flash_attn.__all__)


@pytest.mark.devices("cpu")
def test_the_environment_of_a_process_turns_it_on(device):
    environment = {**os.environ, "FLASH_ATTN_BATCH_INVARIANT": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    program = "import flash_attn; print(flash_attn.is_batch_invariant())"
    done = fresh_process.run(program, env=environment, check=True)
    assert done.stdout.strip() == "True"
