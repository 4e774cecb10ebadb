"""`AttentionMask.documents`: the packed call that a dense call with such a mask becomes, and where it stays a mask."""

import pytest
import torch
from test_masked_calls import check_step, expected, heads_of, randn

import flash_attn
from flash_attn import AttentionMask, flash_attn_func, flash_attn_varlen_func
from flash_attn.masks.documents import packed_documents

HEADS, HEADS_K, SEQLEN, DIM = 4, 2, 96, 16
BOUNDS = {
    "whole": [[0, 30, 30, 64, SEQLEN]],
    "gaps": [[5, 30, 20, 80]],  # falls: as 30, 30
    "outside": [[-7, 40, 3 * SEQLEN]],
    "entries": [[0, 10, SEQLEN, SEQLEN], [7, 8, 9, 80], [90, 90, 90, 90]],
    "nothing": [[0, 0], [96, 96], [50, 50]],
}


def bounds_of(kind, device):
    return torch.tensor(BOUNDS[kind], dtype=torch.int32, device=device)


def inputs(device, batch, packing=3):
    if packing == 1:
        return (randn(device, batch, SEQLEN, 3, HEADS, DIM),)
    q = randn(device, batch, SEQLEN, HEADS, DIM)
    if packing == 2:
        return q, randn(device, batch, SEQLEN, 2, HEADS_K, DIM)
    return (q, *(randn(device, batch, SEQLEN, HEADS_K, DIM) for _ in "kv"))


FUNCTIONS = {1: "flash_attn_qkvpacked_func", 2: "flash_attn_kvpacked_func", 3: "flash_attn_func"}


@pytest.mark.parametrize("packing", FUNCTIONS)
@pytest.mark.parametrize("with_sinks", (False, True), ids=("", "sinks"))
@pytest.mark.parametrize("kind,batch", [(kind, n) for kind, x in BOUNDS.items() for n in {len(x), 3}])
def test_against_the_definition(device, kind, batch, with_sinks, packing):
    mask, tensors = AttentionMask.documents(bounds_of(kind, device), SEQLEN), inputs(device, batch, packing)
    sinks = torch.randn(HEADS, device=device).requires_grad_() if with_sinks else None
    is_packed = packed_documents(mask, tensors, with_sinks) is not None
    assert is_packed == (packing > 1 or (batch == 1 and not with_sinks))
    results = getattr(flash_attn, FUNCTIONS[packing])(
        *tensors, causal=True, mask=mask, sinks=sinks, return_attn_probs=True
    )
    assert results[0].shape == (batch, SEQLEN, HEADS, DIM) and results[1].shape == (batch, HEADS, SEQLEN)
    dense = mask.to_dense().expand(batch, HEADS, SEQLEN, SEQLEN)
    leaves = [*tensors, *([sinks] if with_sinks else [])]
    check_step(results, lambda d: expected(*heads_of(tensors), dense, None, 0.0, d, causal=True, sinks=sinks), leaves)


OPTIONS = (
    {},
    {"causal": True, "return_max_logit": True},
    {"window_size": (9, 4), "softcap": 3.0},
    {"alibi_slopes": torch.rand(HEADS)},
    {"deterministic": True, "batch_invariant": True},
)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda x: "_".join(x))
def test_is_the_packed_call(device, options):
    """The same bits, of gradients too."""
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    cu, (q, k, v) = bounds_of("gaps", device), inputs(device, 1)
    mask = AttentionMask.documents(cu, SEQLEN)
    dense = flash_attn_func(q, k, v, mask=mask, return_attn_probs=True, **options)
    packed = flash_attn_varlen_func(
        q[0], k[0], v[0], cu[0], cu[0], SEQLEN, SEQLEN, return_attn_probs=True, **options
    )  # fmt: skip
    for x, y in zip(dense[:2], packed):
        assert torch.equal(x[0], y)
    assert all(torch.equal(x, y) for x, y in zip(dense[2:], packed[2:]))
    ours, theirs = (torch.autograd.grad((out**3).sum(), (q, k, v)) for out in (dense[0], packed[0]))
    if options.get("deterministic") or device == "cpu":
        assert all(torch.equal(x, y) for x, y in zip(ours, theirs))


STAYS = {
    "dropout": {"dropout_p": 0.1},
    "slopes of entries": {"alibi_slopes": torch.rand(3, HEADS)},
    "bias": {"attn_bias": torch.zeros(1, HEADS, 1, SEQLEN)},
}


@pytest.mark.parametrize("name", STAYS)
def test_stays_a_mask(device, name):
    """Where numbers of rows or batch entries count: the bits of the same ranges."""
    options = {k: x.to(device) if isinstance(x, torch.Tensor) else x for k, x in STAYS[name].items()}
    if "attn_bias" in options:
        options["attn_bias"] = options["attn_bias"].to(randn(device, 1).dtype)
    mask, ranges = (AttentionMask.documents(bounds_of("gaps", device), SEQLEN) for _ in range(2))
    assert ranges.factors.query_ranges is not None
    q, k, v = inputs(device, 3)
    found = []
    for one in (mask, ranges):
        torch.manual_seed(1)
        found.append(flash_attn_func(q, k, v, mask=one, **options))
    assert torch.equal(*found)


def test_what_has_no_packed_call(device):
    mask = AttentionMask.documents(bounds_of("gaps", device), SEQLEN)
    q, k, v = inputs(device, 3)
    strided = torch.stack((k, v), 1)[:, 0]  # entries lie apart
    many = AttentionMask.documents(torch.arange(SEQLEN + 1, device=device), SEQLEN)
    for one, tensors in (
        (mask, (q, strided, v)),
        (mask, (q[:, :-1], k[:, :-1], v[:, :-1])),
        (mask, (q, k[:, 1:], v[:, 1:])),
        (mask, (q[:2], k, v)),
        (AttentionMask.documents(bounds_of("gaps", device)[:, :1], SEQLEN), (q, k, v)),
        (many, (q, k, v)),
        (AttentionMask.document_ids(torch.zeros(SEQLEN, dtype=torch.int32, device=device)), (q, k, v)),
        (mask.to_dense(), (q, k, v)),
    ):
        assert packed_documents(one, tensors, False) is None
    assert torch.equal(flash_attn_func(q, k, v, mask=many), flash_attn_func(q, k, v, mask=many.to_dense()))
    with pytest.raises(RuntimeError, match=f"^mask: expected a mask for seqlen_q {SEQLEN - 1}, got one for {SEQLEN}$"):
        flash_attn_func(q[:, :-1], k[:, :-1], v[:, :-1], mask=mask)


def test_changed_factors_count(device):
    """Who reads the factors may change them; cumulative lengths are copied."""
    cu, (q, k, v) = bounds_of("whole", device), inputs(device, 1)
    mask, before = AttentionMask.documents(cu, SEQLEN), AttentionMask.documents(cu.clone(), SEQLEN)
    cu.zero_()
    assert torch.equal(flash_attn_func(q, k, v, mask=mask), flash_attn_func(q, k, v, mask=before))
    mask.factors.query_ranges.copy_(torch.tensor([0, 1], device=device))
    only_first = flash_attn_func(q, k, v, mask=mask)
    assert torch.equal(only_first[0, :, :HEADS_K], v[0, :1].expand(SEQLEN, -1, -1).repeat_interleave(2, 1)[:, :HEADS_K])


def test_compiled(device):
    """One graph for any bounds."""
    count = []

    def backend(graph, examples):
        count.append(graph)
        return graph

    def step(q, k, v, mask):
        return flash_attn_func(q, k, v, causal=True, mask=mask)

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    q, k, v = inputs(device, 3)
    for bounds in (BOUNDS["gaps"], [[0, 1, 2, 90]]):
        mask = AttentionMask.documents(torch.tensor(bounds, dtype=torch.int32, device=device), SEQLEN)
        assert torch.equal(compiled(q, k, v, mask), step(q, k, v, mask))
    assert len(count) == 1


def test_moves_with_its_documents(device):
    mask = AttentionMask.documents(bounds_of("whole", "cpu"), SEQLEN).to(device)
    leaves, spec = torch.utils._pytree.tree_flatten(mask)
    mask = torch.utils._pytree.tree_unflatten(leaves, spec)
    assert packed_documents(mask, inputs(device, 1), False) is not None
    assert str(device) in repr(mask)
