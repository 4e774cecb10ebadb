"""`AttentionMask.documents`: the packed call that a dense call with such a mask becomes, and where it stays a mask."""

import pytest
import torch
from test_masked_calls import check_step, expected, heads_of, randn

import flash_attn
from flash_attn import AttentionMask, flash_attn_func, flash_attn_varlen_func, observation
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
    {"deterministic": True},
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


def test_batch_invariant_calls_do_not_look_at_the_batch(device):
    """Whether documents become a packed call depends on the number of entries: the bits of a row must not."""
    mask = AttentionMask.documents(torch.arange(0, 21, device=device) * 4, SEQLEN)
    q, k, v = inputs(device, 3)
    whole = flash_attn_func(q, k, v, mask=mask, batch_invariant=True)
    assert torch.equal(flash_attn_func(q[:1], k[:1], v[:1], mask=mask, batch_invariant=True), whole[:1])
    with flash_attn.set_batch_invariant(True):
        assert torch.equal(flash_attn_func(q[:1], k[:1], v[:1], mask=mask), whole[:1])


STAYS = {
    "batch-invariant": {"batch_invariant": True},
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


WRONG = {
    "v has more heads": ((HEADS, DIM), (HEADS_K, DIM), (HEADS, DIM)),
    "k is narrower": ((HEADS, DIM), (HEADS_K, DIM // 2), (HEADS_K, DIM)),
    "q of five axes": ((1, HEADS, DIM), (HEADS_K, DIM), (HEADS_K, DIM)),
    "v of five axes": ((HEADS, DIM), (HEADS_K, DIM), (1, HEADS_K, DIM)),
    "three in kv": ((HEADS, DIM), (3, HEADS_K, DIM)),
    "kv is narrower": ((HEADS, DIM), (2, HEADS_K, DIM // 2)),
    "kv of six axes": ((HEADS, DIM), (1, 2, HEADS_K, DIM)),
    "two in qkv": ((2, HEADS, DIM),),
    "qkv of four axes": ((3, DIM),),
}


@pytest.mark.parametrize("batch", (1, 3))
@pytest.mark.parametrize("name", WRONG)
def test_errors_show_the_callers_shapes(device, name, batch):
    mask = AttentionMask.documents(bounds_of("gaps", device), SEQLEN)
    tensors = [randn(device, batch, SEQLEN, *shape) for shape in WRONG[name]]
    check_same_error(FUNCTIONS[len(tensors)], tensors, mask)


@pytest.mark.parametrize("batch", (1, 3))
def test_errors_of_slopes(device, batch):
    mask = AttentionMask.documents(bounds_of("gaps", device), SEQLEN)
    check_same_error("flash_attn_func", inputs(device, batch), mask, alibi_slopes=torch.rand(HEADS - 1, device=device))


def check_same_error(function, tensors, mask, **options):
    messages = []
    for one in (mask, mask.to_dense()):
        with pytest.raises(RuntimeError) as error:
            getattr(flash_attn, function)(*tensors, mask=one, **options)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_results_may_be_written(device):
    """A view made without gradients could not be, with them."""
    mask, (q, k, v) = AttentionMask.documents(bounds_of("gaps", device), SEQLEN), inputs(device, 1)
    with torch.no_grad():
        results = flash_attn_func(q, k, v, mask=mask, return_attn_probs=True)
    for x in results[:2]:
        x.mul_(torch.ones((), device=device, requires_grad=True))


def test_values_are_checked(device, monkeypatch):
    """FLASH_ATTN_DEBUG=1 takes the bounds that the constructor takes, and rows between documents of two entries."""
    monkeypatch.setattr(observation, "DEBUG", True)
    for kind in BOUNDS:
        mask = AttentionMask.documents(bounds_of(kind, device)[:1], SEQLEN)
        for batch in (1, 3):
            flash_attn_func(*inputs(device, batch), mask=mask)


def test_other_masks_have_their_own_factors(device):
    (q, k, v), mask = inputs(device, 1), AttentionMask.documents(bounds_of("gaps", device), SEQLEN)
    before = flash_attn_func(q, k, v, mask=mask)
    both = mask & AttentionMask.key_padding(torch.ones(SEQLEN, dtype=torch.bool, device=device))
    both.factors.query_ranges.zero_()
    assert not flash_attn_func(q, k, v, mask=both).any()
    dense = flash_attn_func(q, k, v, mask=mask.to_dense())
    torch.testing.assert_close(before, dense)
    assert torch.equal(flash_attn_func(q, k, v, mask=mask), before)


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
    """One graph for any bounds, with LSE too."""
    count = []

    def backend(graph, examples):
        count.append(graph)
        return graph

    def step(q, k, v, mask):
        return flash_attn_func(q, k, v, causal=True, mask=mask, return_attn_probs=True)[:2]

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    q, k, v = inputs(device, 3)
    for bounds in (BOUNDS["gaps"], [[0, 1, 2, 90]]):
        mask = AttentionMask.documents(torch.tensor(bounds, dtype=torch.int32, device=device), SEQLEN)
        assert all(map(torch.equal, compiled(q, k, v, mask), step(q, k, v, mask)))
    assert len(count) == 1


def of_ids(q, ids):
    """Documents whose number only the device knows."""
    begins = torch.nonzero(ids[1:] != ids[:-1]).flatten() + 1
    cu = torch.cat((begins.new_zeros(1), begins, begins.new_full((1,), ids.shape[0])))
    return flash_attn_func(q, q, q, mask=AttentionMask.documents(cu, q.shape[1]))


def of_length(q, cu):
    """A length that only the device knows."""
    length = cu[-1].item()
    torch._check(length > 1)
    torch._check(length <= SEQLEN)
    q = q[:, :length]
    return flash_attn_func(q, q, q, mask=AttentionMask.documents(cu, length))


@pytest.mark.needs_torch((2, 8), "cannot tell what is not known")
@pytest.mark.parametrize("step,other", ((of_ids, torch.arange(SEQLEN) // 30), (of_length, torch.tensor([0, 30, 80]))))
def test_compiled_with_sizes_of_the_device(device, step, other):
    q, other = inputs(device, 2)[0].detach(), other.to(device)
    options = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with torch._dynamo.config.patch(options):
        compiled = torch.compile(step, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(q, other), step(q, other))


class Documents(torch.nn.Module):
    def forward(self, q, cu):
        return flash_attn_func(q, q, q, mask=AttentionMask.documents(cu, q.shape[1]))


class Masked(torch.nn.Module):
    def forward(self, q, mask):
        return flash_attn_func(q, q, q, mask=mask)


@pytest.mark.needs_torch((2, 8), "cannot tell what is exported")
def test_exported(device):
    """With sizes that the caller calls dynamic; also with a mask as an input."""
    dim = torch.export.Dim
    shapes = ({0: dim("b", min=2, max=64), 1: dim("s", min=8, max=4096)}, {0: dim("n", min=2, max=500)})
    q, cu = inputs(device, 2)[0].detach(), torch.tensor([0, 9, 70, SEQLEN], device=device)
    program = torch.export.export(Documents(), (q, cu), dynamic_shapes=shapes, strict=True)
    for batch, size in ((2, 4), (3, 3), (4, 40)):
        q, cu = inputs(device, batch)[0].detach(), torch.linspace(0, SEQLEN, size, device=device).long()
        torch.testing.assert_close(program.module()(q, cu), Documents()(q, cu))
    mask = AttentionMask.documents(cu, SEQLEN)
    program = torch.export.export(Masked(), (q, mask), strict=False)
    torch.testing.assert_close(program.module()(q, mask), Masked()(q, mask))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_trace_takes_other_batches(device):
    mask = AttentionMask.documents(bounds_of("gaps", device), SEQLEN)
    one, three = ([x.detach() for x in inputs(device, batch)] for batch in (1, 3))
    traced = torch.jit.trace(lambda *x: flash_attn_func(*x, mask=mask), one)
    assert torch.equal(traced(*three), flash_attn_func(*three, mask=mask))


def test_moves_with_its_documents(device):
    mask = AttentionMask.documents(bounds_of("whole", "cpu"), SEQLEN).to(device)
    leaves, spec = torch.utils._pytree.tree_flatten(mask)
    mask = torch.utils._pytree.tree_unflatten(leaves, spec)
    assert packed_documents(mask, inputs(device, 1), False) is not None
    assert str(device) in repr(mask)
