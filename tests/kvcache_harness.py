"""Problems of attention over a KV cache: their tensors, the call, and the check against float64.

Everything that no query may see is NaN: rows beyond the lengths, rows before the left padding, tails of pages, unused
pages, cache rows of no sequence, and the gaps of strided layouts. Table entries that nothing needs name no page.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from reference import assert_accurate, attention

from flash_attn import KvCachePlan, flash_attn_with_kvcache

NAN = float("nan")
NO_PAGE = (-1, 10**6)


@dataclass(frozen=True)
class KvCase:
    """One call. lengths: keys in the cache, -1 for an inactive request; seqlen_new None: no new keys.

    leftpad: unused rows at the start of each sequence, which count in lengths. page_size 0: no pages. layout: how the
    cache lies in memory, see `allocate`, or "latent": values, then keys in one row. rotary_dim 0: no rotation.
    head_dim_v: that of qv and of the values, 0 without a qv. mask_keys: how many of the last keys the mask is of, by
    mask heads and, unless mask_shared, by sequence; 0: no mask.
    """

    lengths: tuple[int, ...] = (40, 0, 91, 17)
    seqlen_q: int = 1
    seqlen_new: int | None = None
    capacity: int = 96
    nheads: int = 4
    nheads_k: int = 2
    head_dim: int = 64
    dtype: str = "bfloat16"
    page_size: int = 0
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    leftpad: tuple[int, ...] | None = None
    rotary_dim: int = 0
    interleaved: bool = False
    layout: str = "contiguous"
    head_dim_v: int = 0
    mask_keys: int = 0
    mask_heads: int = 1
    mask_shared: bool = False

    @property
    def new(self) -> int:
        return self.seqlen_new or 0

    def __str__(self):
        """What differs from the defaults: the name of a test."""
        changed = [f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        return "-".join(f"{f.name}={getattr(self, f.name)}".replace(" ", "") for f in changed) or "default"


@dataclass
class KvProblem:
    case: KvCase
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    lengths: torch.Tensor
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    rows: torch.Tensor | None = None  # cache_batch_idx
    table: torch.Tensor | None = None
    leftpad: torch.Tensor | None = None
    slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    qv: torch.Tensor | None = None
    mask: torch.Tensor | None = None  # bool (batch or 1, mask heads, seqlen_q, last keys)

    def clone(self) -> KvProblem:
        """The same problem with new caches, in the same layout."""
        return dataclasses.replace(self, k_cache=clone_view(self.k_cache), v_cache=clone_view(self.v_cache))


def clone_view(x: torch.Tensor) -> torch.Tensor:
    """A copy of a view with its storage, so that strides and what lies between the elements are the same."""
    storage = x.untyped_storage().clone()
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(storage, x.storage_offset(), x.shape, x.stride())


def allocate(layout: str, shape, dtype, device) -> torch.Tensor:
    """NaN in the shape (batch or pages, rows, heads, head_dim), the last dimension contiguous.

    contiguous; permuted: rows, then sequences (megatron); heads_first: heads, then rows; sliced: a part of the features
    of a wider tensor; unaligned: a start and row distances that are odd multiples of an element.
    """
    count, rows, heads, dim = shape

    def full(*sizes):
        return torch.full(sizes, NAN, dtype=dtype, device=device)

    if layout == "permuted":
        return full(rows, count, heads, dim).transpose(0, 1)
    if layout == "heads_first":
        return full(count, heads, rows, dim).transpose(1, 2)
    if layout == "sliced":
        return full(count, rows, heads, dim + 24)[..., 8 : 8 + dim]
    if layout == "unaligned":
        return full(1 + count * rows * heads * (dim + 1))[1:].view(count, rows, heads, dim + 1)[..., :dim]
    assert layout == "contiguous"
    return full(*shape)


def make_problem(case: KvCase, device: str) -> KvProblem:
    dtype, batch = getattr(torch, case.dtype), len(case.lengths)

    def normal(*shape):
        return torch.randn(*shape, device=device).to(dtype)

    def int32(values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    problem = KvProblem(case, normal(batch, case.seqlen_q, case.nheads, case.head_dim), None, None, int32(case.lengths))
    if case.seqlen_new is not None:
        shape = (batch, case.seqlen_new, case.nheads_k)
        problem.k, problem.v = normal(*shape, case.head_dim), normal(*shape, case.head_dim_v or case.head_dim)
    if case.head_dim_v:
        problem.qv = normal(batch, case.seqlen_q, case.nheads, case.head_dim_v)
    if case.rotary_dim:
        angles = torch.rand(case.capacity + 8, case.rotary_dim // 2, device=device) * 6
        problem.cos, problem.sin = angles.cos().to(dtype), angles.sin().to(dtype)
    if case.leftpad is not None:
        problem.leftpad = int32(case.leftpad)
    if case.alibi:
        problem.slopes = torch.rand(batch, case.nheads, device=device) * 0.3
    _fill_cache(problem, dtype, device)
    if case.mask_keys:
        shape = (1 if case.mask_shared else batch, case.mask_heads, case.seqlen_q, case.mask_keys)
        problem.mask = torch.rand(shape, device=device) < 0.6
    if case.sinks:
        problem.sinks = 3 * torch.randn(case.nheads, device=device)
    return problem


def _fill_cache(problem: KvProblem, dtype, device) -> None:
    case, batch = problem.case, len(problem.case.lengths)
    if case.page_size:
        pages = -(-case.capacity // case.page_size)
        pool = torch.randperm(batch * pages + 3)
        table = pool[: batch * pages].view(batch, pages).int()
        for row, length in zip(table, case.lengths):
            unused = row[-(-(length + case.new) // case.page_size) if length >= 0 else 0 :]
            unused[0::2], unused[1::2] = NO_PAGE
        problem.table = table.to(device)
        shape = (len(pool), case.page_size, case.nheads_k)
    else:
        problem.rows = torch.randperm(batch + 2)[:batch].int().to(device)
        shape = (batch + 2, case.capacity, case.nheads_k)
    dims = (case.head_dim, case.head_dim_v or case.head_dim)
    if case.layout == "latent":
        rows = allocate("contiguous", (*shape, sum(dims)), dtype, device)
        problem.k_cache, problem.v_cache = rows[..., dims[1] :], rows[..., : dims[1]]
    else:
        problem.k_cache, problem.v_cache = (allocate(case.layout, (*shape, dim), dtype, device) for dim in dims)
    for i, length in enumerate(case.lengths):
        first = case.leftpad[i] if case.leftpad else 0
        for cache in (problem.k_cache, problem.v_cache):
            values = torch.randn(max(length - first, 0), *cache.shape[2:], device=device).to(dtype)
            put_rows(problem, cache, i, first, values)


def places(problem: KvProblem, i: int, first: int, stop: int):
    """Index of the cache that holds the rows [first, stop) of sequence i."""
    positions = torch.arange(first, max(first, stop), device=problem.q.device)
    if problem.table is None:
        row = i if problem.rows is None else problem.rows[i].long()
        return row, positions
    page_size = problem.k_cache.shape[1]
    return problem.table[i].long()[positions // page_size], positions % page_size


def put_rows(problem, cache, i, first, values):
    cache[places(problem, i, first, first + len(values))] = values


def get_rows(problem, cache, i, first, stop) -> torch.Tensor:
    return cache[places(problem, i, first, stop)]


def run(problem: KvProblem, **overrides):
    """The public call of a problem -> (out, lse). Its cache is extended."""
    case = problem.case
    arguments = {
        "k": problem.k, "v": problem.v, "rotary_cos": problem.cos, "rotary_sin": problem.sin,
        "cache_seqlens": problem.lengths, "cache_batch_idx": problem.rows, "cache_leftpad": problem.leftpad,
        "block_table": problem.table, "causal": case.causal, "window_size": case.window, "softcap": case.softcap,
        "rotary_interleaved": case.interleaved, "alibi_slopes": problem.slopes, "sinks": problem.sinks,
        "return_softmax_lse": True, "qv": problem.qv, "mask_bits": problem.mask,
    }  # fmt: skip
    return flash_attn_with_kvcache(problem.q, problem.k_cache, problem.v_cache, **{**arguments, **overrides})


def plan_for(problem, **options):
    """A plan from the sizes and options of a problem."""
    c = problem.case
    seqlen_cache = problem.table.shape[1] * c.page_size if c.page_size else c.capacity
    options = {"causal": c.causal, "window_size": c.window, "cache_leftpad": problem.leftpad, **options}
    options.setdefault("kv_cache_dtype", problem.k_cache.dtype)
    options.setdefault("head_dim_v", c.head_dim_v)
    return KvCachePlan(
        problem.lengths, c.seqlen_q, c.nheads, c.nheads_k, c.head_dim, seqlen_cache, seqlen_new=c.new, **options
    )


def rotated(x, cos, sin, positions, interleaved):
    """Rotary embedding of x (rows, heads, d) in float64 by complex multiplication."""
    half = cos.shape[1]
    turn = torch.complex(cos.double(), sin.double())[positions][:, None]
    x, rest = x.double()[..., : 2 * half], x.double()[..., 2 * half :]
    pairs = torch.stack([x[..., 0::2], x[..., 1::2]], -1) if interleaved else torch.stack(x.split(half, -1), -1)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    both = turned.flatten(-2) if interleaved else torch.cat([turned[..., 0], turned[..., 1]], -1)
    return torch.cat([both, rest], -1)


def rotated_queries(problem: KvProblem, i: int) -> torch.Tensor:
    """Queries of sequence i as attention sees them: under a mask each has its own angle, else all have one."""
    case, n = problem.case, problem.case.lengths[i]
    if not case.rotary_dim:
        return problem.q[i]
    masked = case.causal or case.window != (-1, -1)
    positions = torch.arange(n, n + case.seqlen_q) if masked else torch.full((case.seqlen_q,), n)
    turned = rotated(problem.q[i], problem.cos, problem.sin, positions.to(problem.q.device), case.interleaved)
    return turned.to(problem.q.dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    """The values as integers: NaN equals NaN."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def check_append(problem: KvProblem, before: KvProblem, takes_part=None):
    """The new rows, rotated, are where they belong; every other element of the caches' storage is as before."""
    case = problem.case
    for name, new in (("k_cache", problem.k), ("v_cache", problem.v)):
        after, restored = getattr(problem, name), clone_view(getattr(problem, name))
        for i, n in enumerate(case.lengths):
            if new is None or n < 0 or (takes_part is not None and not takes_part[i]):
                continue
            written = get_rows(problem, after, i, n, n + case.new)
            if name == "k_cache" and case.rotary_dim:
                positions = torch.arange(n, n + case.new, device=new.device)
                wanted = rotated(new[i], problem.cos, problem.sin, positions, case.interleaved)
                unit = torch.finfo(new.dtype).eps
                assert ((written.double() - wanted).abs() <= unit * wanted.abs() + 1e-6).all(), "rotated keys"
            else:
                assert torch.equal(written, new[i]), f"new rows of {name}, sequence {i}"
            put_rows(problem, restored, i, n, get_rows(before, getattr(before, name), i, n, n + case.new))
        old = getattr(before, name)
        same = torch.equal(storage_bits(restored), storage_bits(old))
        assert same, f"{name}: written outside the new rows"


def storage_bits(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def check_attention(problem: KvProblem, out, lse, takes_part=None):
    """out and LSE of every sequence against float64 attention over the keys that are in the cache now."""
    case = problem.case
    assert out.shape == (*problem.q.shape[:-1], problem.v_cache.shape[-1]) and out.dtype == problem.q.dtype
    assert lse.dtype == (torch.float64 if out.dtype == torch.float64 else torch.float32)
    assert lse.shape == (len(case.lengths), case.nheads, case.seqlen_q)
    slack = 1e-10 if out.dtype == torch.float64 else 1e-5
    for i, n in enumerate(case.lengths):
        if n < 0 or (takes_part is not None and not takes_part[i]):
            assert (out[i] == 0).all() and (lse[i] == math.inf).all(), f"sequence {i} is an inactive request"
            continue
        first = min(case.leftpad[i], n + case.new) if case.leftpad else 0
        keys, values = (get_rows(problem, x, i, first, n + case.new) for x in (problem.k_cache, problem.v_cache))
        queries = rotated_queries(problem, i)
        if problem.qv is not None:
            queries, keys = torch.cat([queries, problem.qv[i]], -1), torch.cat([keys, values], -1)
        operands = [x[None] for x in (queries, keys, values)]
        options = {"causal": case.causal, "window": case.window, "softcap": case.softcap, "sinks": problem.sinks}
        options["mask"] = seen_by_mask(problem, i, keys.shape[0])
        options["alibi_slopes"] = None if problem.slopes is None else problem.slopes[i : i + 1]
        reference, plain = attention(*operands, **options), attention(*operands, **options, dtype=out.dtype)
        assert_accurate(out[i : i + 1], reference.out, plain.out, f"out of sequence {i}", slack=slack)
        assert_accurate(lse[i : i + 1], reference.lse, plain.lse, f"lse of sequence {i}", slack=slack)


def shortened(case: KvCase) -> KvCase:
    """The case with at most 1100 keys a sequence: more than two blocks of the CPU backend."""
    if case.capacity <= 1100 + case.new:
        return case
    leftpad = None if case.leftpad is None else tuple(min(n, 800) for n in case.leftpad)
    lengths = tuple(min(n, 1100) for n in case.lengths)
    return dataclasses.replace(case, lengths=lengths, leftpad=leftpad, capacity=1100 + case.new)


def seen_by_mask(problem, i, seqlen_k):
    """What the mask leaves of the scores of sequence i: bool (1, nheads, seqlen_q, seqlen_k), or None."""
    if problem.mask is None:
        return None
    mask = problem.mask[i % len(problem.mask)].repeat_interleave(problem.case.nheads // problem.case.mask_heads, 0)
    count = min(mask.shape[-1], seqlen_k)
    earlier = mask.new_ones(*mask.shape[:2], seqlen_k - count)
    return torch.cat([earlier, mask[..., mask.shape[-1] - count :]], -1)[None]


def check_call(case: KvCase, device: str, **overrides):
    """Make a problem, call, check the cache and the result -> (problem, out, lse). Shortened on the CPU."""
    problem = make_problem(shortened(case) if device == "cpu" else case, device)
    before = problem.clone()
    out, lse = run(problem, **overrides)
    check_append(problem, before)
    check_attention(problem, out, lse)
    return problem, out, lse
