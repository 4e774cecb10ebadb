"""Functions of ring-flash-attention on this package: their layouts and results, in CPU processes."""

from __future__ import annotations

import gc
import importlib
import random
import sys
import weakref
from unittest.mock import MagicMock

import cp_workers
import pytest
import torch
import torch.distributed as dist
from signatures import plain_signature

from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn.context_parallel import CpPlan, LocalGroup, flash_attn_cp_func
from flash_attn.context_parallel.compat import plan_cache
from flash_attn.context_parallel.compat import ring_flash_attn as compat

HEADS, HEADS_K, DIM = 4, 2, 8
MASKS = ({"causal": True}, {"causal": False}, {"causal": True, "window_size": (7, 0)}, {"causal": True, "alibi": True})
NO_ADAPTERS = "ring_flash_attn.adapters", MagicMock()  # they need older versions of transformers


def run(size, function):
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("torch.distributed has no gloo")
    cp_workers.run_processes(function, size, "gloo")


def own_rows(bounds, kind, rank, ranks):
    """Indices of a rank's tokens in that package, chunk by chunk."""
    rows = []
    for first, last in zip(bounds, bounds[1:]):
        tokens = torch.arange(first, last)
        if kind == "zigzag":
            chunks = tokens.chunk(2 * ranks)
            rows += [chunks[rank], chunks[2 * ranks - 1 - rank]]
        else:
            rows.append(tokens.chunk(ranks)[rank])
    return torch.cat(rows)


def tensors(*rows):
    """q, k, v and dout of all tokens, equal on all ranks."""
    generator = torch.Generator().manual_seed(sum(rows))
    heads = (HEADS, HEADS_K, HEADS_K, HEADS)
    return [torch.randn(*rows, h, DIM, dtype=torch.float64, generator=generator) for h in heads]


def slopes_of(options):
    options = dict(options)
    if options.pop("alibi", False):
        options["alibi_slopes"] = torch.tensor([0.5, 0.25, 0.125, 0.0])
    return options


def check(form, call, alone, whole, rows, axis, options):
    """Results and gradients of one form of a function equal the rank's rows of those of one process."""
    options = slopes_of(options)
    all_inputs = [x.clone().requires_grad_() for x in whole[:3]]
    expected, expected_lse, _ = alone(*all_inputs, return_attn_probs=True, **options)
    expected_grads = torch.autograd.grad(expected, all_inputs, whole[3])
    q, k, v, dout = (x.index_select(axis, rows) for x in whole)
    if form == "qkvpacked_":
        k, v = (x.repeat_interleave(HEADS // HEADS_K, axis + 1) for x in (k, v))
        inputs = [torch.stack([q, k, v], axis + 1)]
    else:
        inputs = [q, torch.stack([k, v], axis + 1)] if form == "kvpacked_" else [q, k, v]
    inputs = [x.requires_grad_() for x in inputs]
    out, lse, nothing = call(*inputs, return_attn_probs=True, **options)
    assert nothing is None and torch.equal(call(*inputs, **options), out)
    grads = [g for grad, x in zip(torch.autograd.grad(out, inputs, dout), inputs)
             for g in (grad.unbind(axis + 1) if x.dim() > q.dim() else (grad,))]  # fmt: skip
    if form == "qkvpacked_":
        grads[1:] = [g.unflatten(axis + 1, (HEADS_K, -1)).sum(axis + 2) for g in grads[1:]]
    pairs = [(out, expected), *zip(grads, expected_grads)]
    for ours, exact in pairs:
        torch.testing.assert_close(ours, exact.index_select(axis, rows), atol=1e-10, rtol=0)
    torch.testing.assert_close(lse, expected_lse.index_select(-1, rows).to(lse.dtype), atol=1e-10, rtol=0)


def all_functions(device):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    forms = ("", "kvpacked_", "qkvpacked_")
    for index, options in enumerate(MASKS):
        for kind, prefix in (("contiguous", "ring_flash_attn"), ("zigzag", "zigzag_ring_flash_attn")):
            form = forms[index % 3]
            seqlen = 6 * ranks
            call = getattr(compat, f"{prefix}_{form}func")
            check(form, call, flash_attn_func, tensors(2, seqlen), own_rows((0, seqlen), kind, rank, ranks), 1, options)

            form = forms[(index + 1) % 3]
            local = torch.tensor([0, 4, 4, 14, 16], dtype=torch.int32)
            bounds = local * ranks
            rows = own_rows(bounds.tolist(), kind, rank, ranks)
            function = getattr(compat, f"{prefix}_varlen_{form}func")
            check(form, of_documents(function, local), of_documents(flash_attn_varlen_func, bounds, bounds),
                  tensors(int(bounds[-1])), rows, 0, options)  # fmt: skip
        llama3(forms[(index + 2) % 3], options, rank, ranks)


def of_documents(function, *cu_seqlens):
    longest = [int(cu.diff().max()) for cu in cu_seqlens]
    return lambda *inputs, **options: function(*inputs, *cu_seqlens, *longest, **options)


def llama3(form, options, rank, ranks):
    """Documents that end inside chunks, at their ends, and empty ones; copies of lengths give the same."""
    each = 10
    inner = [3, 3, 10, 4 + 10 * (ranks - 1)]
    cu_seqlens = torch.tensor([0, *inner, each * ranks], dtype=torch.int32)
    rows = own_rows((0, each * ranks), "contiguous", rank, ranks)
    prepared = compat.llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, options["causal"], rank, ranks)
    *sizes, local_k_slice = prepared
    function = getattr(compat, f"llama3_flash_attn_varlen_{form}func")
    for is_copy in (False, True):
        given = [x.clone() if is_copy and isinstance(x, torch.Tensor) else x for x in sizes]

        def call(*inputs, given=given, **more):
            return function(*inputs, *given, heads_k_stride=1, local_k_slice=local_k_slice, **more)

        check(form, call, of_documents(flash_attn_varlen_func, cu_seqlens, cu_seqlens), tensors(each * ranks), rows, 0,
              options)  # fmt: skip


def dropout_equals_that_of_a_plan(device):
    plan = CpPlan.dense(24, layout="zigzag", tile=1)
    q, k, v = (plan.shard(x, 1) for x in tensors(1, 24)[:3])
    torch.manual_seed(5)
    expected = flash_attn_cp_func(q, k, v, 0.5, causal=True, plan=plan)
    torch.manual_seed(5)
    assert torch.equal(compat.zigzag_ring_flash_attn_func(q, k, v, 0.5, causal=True), expected)


def errors_raise_on_all_ranks(device):
    """Before and after a plan for the lengths is cached; the group is usable afterwards."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    q, k, v, _ = tensors(1, 4)
    odd, cu = (torch.tensor([0, n, 4]) for n in (1, 2))
    local_k_slice = slice(4 * dist.get_rank(), None)

    def varlen(bounds):
        compat.zigzag_ring_flash_attn_varlen_func(q[0], k[0], v[0], bounds, 2)

    def llama3(bounds, **options):
        compat.llama3_flash_attn_varlen_func(q[0], k[0], v[0], bounds, bounds, 2, 2, 1, local_k_slice, **options)

    for _ in range(2):
        for call, message in (
            (lambda: compat.ring_flash_attn_func(q[:, :3] if is_last else q, k, v), "expected the"),
            (lambda: compat.ring_flash_attn_func(q[0] if is_last else q, k, v), "q: expected shape"),
            (
                lambda: compat.zigzag_ring_flash_attn_func(*(x[:, :3] if is_last else x for x in (q, k, v))),
                "two chunks",
            ),
            (lambda: compat.ring_flash_attn_qkvpacked_func(q if is_last else torch.stack([q] * 3, 2)), "qkv: expected"),
            (lambda: varlen(odd if is_last else cu), "cu_seqlens: expected two chunks"),
            (lambda: varlen(cu.double() if is_last else cu), "cu_seqlens: expected int32 or int64"),
            (lambda: varlen(cu.flip(0) if is_last else cu), "cu_seqlens: expected ascending values from 0"),
            (lambda: llama3(cu[:2] if is_last else cu.clone()), "cu_seqlens_q: expected the 4 tokens of q"),
            (lambda: llama3(cu, alibi_slopes=torch.ones(2, HEADS)), "alibi_slopes: expected shape"),
        ):
            with pytest.raises((RuntimeError, TypeError), match=message if is_last else "expected"):
                call()
        compat.ring_flash_attn_func(q, k, v)
        varlen(cu)
        llama3(cu)
    with pytest.raises(
        (TypeError, RuntimeError), match="group: expected a ProcessGroup"
    ):  # on one rank, which tells all
        compat.ring_flash_attn_func(q, k, v, group=3 if is_last else None)


def plans_end_with_their_group(device):
    group = dist.new_group()
    q, k, v, _ = tensors(1, 40)
    for seqlen in range(1, plan_cache.MOST_PLANS + 3):
        out = compat.ring_flash_attn_func(*(x[:, :seqlen].requires_grad_() for x in (q, k, v)), group=group)
    assert len(plan_cache._groups[group].plans) == plan_cache.MOST_PLANS
    out.sum().backward()
    alive = weakref.ref(group), weakref.ref(plan_cache._groups[group].communicator)
    del out
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert [x() for x in alive] == [None, None]


def work(device):
    """All in one start of processes, which takes longer than the attention."""
    for function in (
        all_functions, dropout_equals_that_of_a_plan, errors_raise_on_all_ranks, plans_end_with_their_group,
    ):  # fmt: skip
        function(device)


@pytest.mark.devices("cpu")
def test_ring_flash_attn(device):
    run(3, work)


@pytest.fixture
def package(monkeypatch):
    monkeypatch.setitem(sys.modules, *NO_ADAPTERS)
    return pytest.importorskip("ring_flash_attn")


@pytest.mark.devices("cpu")
def test_signatures_equal_those_of_the_package(device, package):
    for name in compat.__all__:
        assert plain_signature(getattr(compat, name)) == plain_signature(getattr(package, name)), name
    theirs = {name for name in vars(package) if name.endswith(("_func", "_cu_seqlens"))}
    assert theirs - set(compat.__all__) == {f"stripe_flash_attn_{form}func" for form in ("", "kvpacked_", "qkvpacked_")}


def both_packages(device):
    """Shapes, dtypes and values of this module and of the package, which calls the same kernels."""
    sys.modules.update([NO_ADAPTERS])
    package = importlib.import_module("ring_flash_attn")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    local, stream = (torch.tensor(bounds, dtype=torch.int32) for bounds in ([0, 4, 10, 16], [0, 5, 20, 16 * ranks]))
    for name in sorted(set(compat.__all__) - {"llama3_flash_attn_prepare_cu_seqlens"}):
        rows = (16,) if "varlen" in name else (2, 16)
        q, k, v = (torch.randn(*rows, 2, DIM, dtype=torch.bfloat16) for _ in range(3))
        inputs = [q, k, v]
        if "qkvpacked" in name:
            inputs = [torch.stack(inputs, len(rows))]
        elif "kvpacked" in name:
            inputs = [q, torch.stack([k, v], len(rows))]
        results = []
        for module in (compat, package):
            lengths, options = (local, 6) if "varlen" in name else (), {}
            if name.startswith("llama3"):
                *lengths, part = module.llama3_flash_attn_prepare_cu_seqlens(stream, True, rank, ranks)
                options = {"heads_k_stride": 1, "local_k_slice": part}
            own = [x.clone().requires_grad_() for x in inputs]
            out, lse, nothing = getattr(module, name)(*own, *lengths, causal=True, return_attn_probs=True, **options)
            assert nothing is None
            results.append([out, lse, *torch.autograd.grad(out, own, torch.ones_like(out))])
        for ours, theirs in zip(*results):
            assert ours.is_contiguous() == theirs.is_contiguous(), name
            torch.testing.assert_close(ours, theirs, atol=0.05, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.devices("cpu")
def test_results_equal_those_of_the_package(device, package):
    run(2, both_packages)


@pytest.mark.devices("cpu")
def test_llama3_preparation_equals_that_of_the_package(device, package):
    for _ in range(200):
        ranks = random.choice((1, 2, 3, 8))
        total = ranks * random.randint(1, 20)
        bounds = [0, *sorted(random.choices(range(total + 1), k=random.randint(0, 5))), total]
        cu_seqlens, causal = torch.tensor(bounds, dtype=torch.int32), random.random() < 0.5
        for rank in range(ranks):
            given = cu_seqlens, causal, rank, ranks
            ours, theirs = (module.llama3_flash_attn_prepare_cu_seqlens(*given) for module in (compat, package))
            assert [x.tolist() for x in ours[:2]] == [x.tolist() for x in theirs[:2]], given
            assert ours[2:] == theirs[2:], given


@pytest.mark.devices("cpu")
def test_llama3_preparation(device):
    cu_seqlens = torch.tensor([0, 3, 9, 12])
    found = compat.llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, True, 1, 3)
    assert [x.tolist() for x in found[:2]] == [[0, 4], [0, 5]] and found[2:] == (4, 5, slice(3, 8))
    found = compat.llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, False, 1, 3)
    assert [x.tolist() for x in found[:2]] == [[0, 4], [0, 6]] and found[2:] == (4, 6, slice(3, 9))
    with pytest.raises(RuntimeError, match="cu_seqlens: expected a number of tokens that 5 divides, got 12"):
        compat.llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, True, 0, 5)
    with pytest.raises(RuntimeError, match="rank: expected one of 3, got 3"):
        compat.llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, True, 3, 3)


@pytest.mark.devices("cpu")
def test_a_given_layout(device):
    """Every third token per rank. Spans that are no partition raise, and different spans on the ranks."""
    whole = tensors(1, 12)
    spans = [[(i, i + 1) for i in range(r, 12, 3)] for r in range(3)]

    def rows(rank):
        plan = CpPlan.dense(12, group=rank, layout=spans)
        assert plan.token_indices().tolist() == list(range(rank.rank, 12, 3))
        q, k, v = (plan.shard(x, 1) for x in whole[:3])
        return plan.unshard(flash_attn_cp_func(q, k, v, causal=True, plan=plan), 1)

    expected = flash_attn_func(*whole[:3], causal=True)
    for out in LocalGroup(3).run(rows):
        torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)
    wrong = (
        [[(0, 12)]],
        [[(0, 7)], [(6, 12)]],
        [[(0, 5)], [(6, 12)]],
        [[(6, 12), (0, 3)], [(3, 6)]],
        [[(0, 12)], [(5, 4)]],
    )
    for layout in wrong:
        with pytest.raises(RuntimeError, match="layout: expected one of .* for each of 2 ranks"):
            LocalGroup(2).run(lambda rank, layout=layout: CpPlan.dense(12, group=rank, layout=layout))
    with pytest.raises(TypeError, match="layout: expected"):
        LocalGroup(2).run(lambda rank: CpPlan.dense(12, group=rank, layout=[3, 4]))
    with pytest.raises(RuntimeError, match="CpPlan: expected the same on every rank"):
        halves = [[(0, 6)], [(6, 12)]]
        LocalGroup(2).run(lambda rank: CpPlan.dense(12, group=rank, layout=halves if rank.rank else halves[::-1]))


@pytest.mark.devices("cpu")
def test_bounds_are_cached_until_the_tensor_is_written_to(device):
    known, x = plan_cache.BoundsOfTensors(), torch.tensor([0, 3])
    known.put(x, (0, 3))
    assert known.get(x) == (0, 3) and known.get(x.clone()) is None
    x[1] = 4
    assert known.get(x) is None
    with torch.inference_mode():  # these tensors have no version
        y = torch.tensor([0, 3])
        known.put(y, (0, 3))
        assert known.get(y) is None
        prepared = compat.llama3_flash_attn_prepare_cu_seqlens(y + 0, True, 0, 1)[0]
        assert compat._prepared.get(prepared) == (0, 3)
    del x, y
    gc.collect()
    assert not len(known._found)
