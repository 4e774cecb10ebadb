"""mask, attn_bias and rel_bias of the public functions, against the float64 reference and under what watches a call."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from harness import by_function, exact_keep_scale
from reference import assert_accurate, assert_gradient_accurate, attention
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import flash_attn
from flash_attn import AttentionMask, backends, flash_attn_func, flash_attn_varlen_func
from flash_attn.flash_attn_interface import FlashAttnFunc
from flash_attn.ops.attention_args import Options

BATCH, HEADS, HEADS_K, SEQLEN, DIM = 2, 4, 2, 37, 16
LENGTHS = (20, 0, 17)
TOTAL, LONGEST = sum(LENGTHS), max(LENGTHS)


def dtype_of(device):
    return torch.float64 if device == "cpu" else torch.bfloat16


def randn(device, *shape, grad=True):
    return torch.randn(shape, device=device, dtype=dtype_of(device)).requires_grad_(grad)


def cumulative(device, lengths=LENGTHS):
    return torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)


def rel_bias_of(device, reach=3):
    return torch.randn(HEADS, 2 * reach + 1, device=device).requires_grad_()


def heads_of(inputs):
    """(q, k, v) of inputs in any packing."""
    if len(inputs) == 3:
        return inputs
    return inputs[0].unbind(-3) if len(inputs) == 1 else (inputs[0], *inputs[1].unbind(-3))


def expected(q, k, v, dense, keep, dropout_p, dtype, **options):
    """(out, LSE) by the definition."""
    options = {name: x if name == "causal" else x.to(dtype) for name, x in options.items() if x is not None}
    rp = {} if keep is None else {"keep": keep, "rp_dropout": exact_keep_scale(dropout_p)}
    result = attention(q.to(dtype), k.to(dtype), v.to(dtype), mask=dense, dtype=dtype, **rp, **options)
    return result.out, result.lse


def check_step(results, reference, leaves):
    """Results and gradients against reference(dtype) -> (out, LSE)."""
    out, lse = results[:2]
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    ours = torch.autograd.grad((out, lse), leaves, (dout, dlse))

    def by_definition(dtype):
        right, right_lse = reference(dtype)
        dlse_seen = dlse.to(dtype).masked_fill(right_lse.isinf(), 0.0)
        grads = torch.autograd.grad((right, right_lse), leaves, (dout.to(dtype), dlse_seen))
        return (right, right_lse), grads

    (right, right_lse), grads = by_definition(torch.float64)
    (plain, plain_lse), plain_grads = by_definition(out.dtype)
    slack = 1e-10 if out.dtype == torch.float64 else 1e-5
    assert_accurate(out, right, plain, slack=slack)
    assert_accurate(lse, right_lse, plain_lse.to(lse.dtype), "lse", slack=slack)
    for i, (mine, right, plain) in enumerate(zip(ours, grads, plain_grads)):
        assert mine.dtype == leaves[i].dtype and mine.shape == leaves[i].shape
        assert_gradient_accurate(mine, right, plain, f"gradient {i}")


DENSE = {"flash_attn_func": 3, "flash_attn_qkvpacked_func": 1, "flash_attn_kvpacked_func": 2}


def dense_inputs(device, count):
    if count == 1:
        return [randn(device, BATCH, SEQLEN, 3, HEADS, DIM)]
    shape = (BATCH, SEQLEN, HEADS_K, DIM)
    rest = [randn(device, BATCH, SEQLEN, 2, *shape[2:])] if count == 2 else [randn(device, *shape) for _ in "kv"]
    return [randn(device, BATCH, SEQLEN, HEADS, DIM), *rest]


@pytest.mark.parametrize("dropout_p", (0.0, 0.2))
@pytest.mark.parametrize("name", DENSE)
def test_dense_functions(device, name, dropout_p):
    """Biases with and without axes that broadcast, with causal, sinks and grouped heads."""
    inputs = dense_inputs(device, DENSE[name])
    ids = torch.randint(0, 3, (BATCH, SEQLEN), device=device).sort(-1).values
    mask = AttentionMask.document_ids(ids)
    attn_bias, rel_bias = randn(device, HEADS, 1, SEQLEN), rel_bias_of(device)
    sinks = torch.randn(HEADS, device=device).requires_grad_()
    options = {"causal": True, "sinks": sinks, "attn_bias": attn_bias, "rel_bias": rel_bias}
    function = getattr(flash_attn, name)
    results = function(*inputs, dropout_p, mask=mask, return_attn_probs=True, **options)
    keep = results[2][:, :, :SEQLEN, :SEQLEN] >= 0 if dropout_p else None
    dense = mask.to_dense().expand(BATCH, HEADS, SEQLEN, SEQLEN)
    options["attn_bias"] = attn_bias.expand(1, HEADS, SEQLEN, SEQLEN)
    leaves = [*inputs, sinks, attn_bias, rel_bias]
    check_step(results, lambda d: expected(*heads_of(inputs), dense, keep, dropout_p, d, **options), leaves)


PACKED = {"flash_attn_varlen_func": 3, "flash_attn_varlen_qkvpacked_func": 1, "flash_attn_varlen_kvpacked_func": 2}


def packed_reference(device, inputs, mask, attn_bias, rel_bias, lengths=LENGTHS):
    """dtype -> (out, LSE), sequence by sequence; mask: bool (h_m, total, longest)."""

    def by_definition(dtype):
        parts, first = [], 0
        for n in LENGTHS:
            rows = slice(first, first + n)
            first += n
            if n:
                part = [x[None, rows] for x in heads_of(inputs)]
                dense, bias = mask[None, :, rows, :n].expand(1, HEADS, n, n), attn_bias[None, :, rows, :n]
                bias = bias.expand(1, HEADS, n, n)
                parts.append(expected(*part, dense, None, 0, dtype, attn_bias=bias, rel_bias=rel_bias))
        return torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], -1)

    return by_definition


@pytest.mark.parametrize("name", PACKED)
def test_packed_functions(device, name):
    count = PACKED[name]
    rest = [(HEADS_K, DIM)] * 2 if count == 3 else [(2, HEADS_K, DIM)]
    shapes = [(3, HEADS, DIM)] if count == 1 else [(HEADS, DIM), *rest]
    inputs = [randn(device, TOTAL, *shape) for shape in shapes]
    seen = torch.rand(2, TOTAL, LONGEST, device=device) > 0.4
    attn_bias, rel_bias = randn(device, 1, TOTAL, LONGEST), rel_bias_of(device)
    cu = cumulative(device)
    lengths = (cu, LONGEST) if count == 1 else (cu, cu, LONGEST, LONGEST)
    results = getattr(flash_attn, name)(
        *inputs, *lengths, mask=seen, attn_bias=attn_bias, rel_bias=rel_bias, return_attn_probs=True
    )
    dense = seen.repeat_interleave(HEADS // 2, 0)
    reference = packed_reference(device, inputs, dense, attn_bias, rel_bias)
    check_step(results, reference, [*inputs, attn_bias, rel_bias])


def test_rows_in_use(device):
    """Rows of masks and biases go with those of q that seqused_q keeps."""
    q, k, v = (randn(device, TOTAL, h, DIM) for h in (HEADS, HEADS_K, HEADS_K))
    cu, used = cumulative(device), torch.tensor([7, 0, 11], device=device)
    lo, hi = torch.randint(0, LONGEST, (2, 1, TOTAL), device=device).sort(0).values
    hidden = torch.randint(0, 12, (1, TOTAL, 2), device=device)
    seen = torch.rand(1, TOTAL, LONGEST, device=device) > 0.3
    mask = AttentionMask.query_ranges(lo, hi + 1, packed=True)
    mask = mask & AttentionMask.from_startend_row_indices(torch.cat([hidden, hidden + 3], -1)[..., 1:3], True,
                                                          cu_seqlens_k=cu)  # fmt: skip
    mask = mask & AttentionMask.from_tensor(seen, packed=True)
    bias = randn(device, HEADS, TOTAL, LONGEST)
    options = {"mask": mask, "attn_bias": bias}
    whole = flash_attn_varlen_func(q, k, v, cu, cu, LONGEST, LONGEST, **options)
    part = flash_attn_varlen_func(q, k, v, cu, cu, LONGEST, LONGEST, seqused_q=used, **options)
    rows = torch.cat([torch.arange(n, device=device) < u for n, u in zip(LENGTHS, used.tolist())])
    torch.testing.assert_close(part[rows], whole[rows])
    assert not part[~rows].any()
    dout = torch.randn_like(whole)
    kept = dout.masked_fill(~rows[:, None, None], 0)
    leaves = (q, k, v, bias)
    for ours, right in zip(torch.autograd.grad(part, leaves, dout), torch.autograd.grad(whole, leaves, kept)):
        torch.testing.assert_close(ours, right)
    with pytest.raises(RuntimeError, match="^attn_bias: expected 3 dimensions, the second of 37 rows"):
        short = {**options, "attn_bias": bias[:, :-1]}
        flash_attn_varlen_func(q, k, v, cu, cu, LONGEST, LONGEST, seqused_q=used, **short)


@pytest.mark.parametrize("axes", ((), (0,), (1,), (0, 1), (2,), (3,), (2, 3), (0, 1, 2, 3)))
def test_bool_tensors_broadcast(device, axes):
    """A tensor, its expansion and the mask made of it are one mask."""
    full = (BATCH, HEADS, SEQLEN, SEQLEN)
    q, k, v = dense_inputs(device, 3)
    seen = torch.rand([1 if i in axes else n for i, n in enumerate(full)], device=device) > 0.3
    right = expected(q, k, v, seen.expand(full), None, 0, torch.float64)[0]
    out = flash_attn_func(q, k, v, mask=seen)
    assert_accurate(out, right, right.to(out.dtype), slack=1e-10)
    for mask in (seen.expand(full), AttentionMask.from_tensor(seen, SEQLEN)):
        assert torch.equal(flash_attn_func(q, k, v, mask=mask), out)


def masked_step(q, k, v, mask, attn_bias, rel_bias):
    return flash_attn_func(q, k, v, causal=True, mask=mask, attn_bias=attn_bias, rel_bias=rel_bias)


def step_arguments(device, kind):
    masks = {
        "mask": lambda: AttentionMask.documents(cumulative(device, (10, 20)), SEQLEN),
        "blocks": lambda: AttentionMask.from_block_lists(
            torch.tensor([[[1, 2, 1]]], device=device), torch.tensor([[[[0, 0], [1, 0], [2, 2]]]], device=device),
            block_size=(16, 16), seqlen_q=SEQLEN, seqlen_k=SEQLEN,
        ),
        "tensor": lambda: torch.rand(BATCH, 1, SEQLEN, SEQLEN, device=device) > 0.4,
    }  # fmt: skip
    attn_bias = randn(device, HEADS, SEQLEN, 1)
    return [*dense_inputs(device, 3), masks[kind](), attn_bias, rel_bias_of(device)]


def gradients(function, arguments):
    leaves = [x for x in arguments if isinstance(x, torch.Tensor) and x.requires_grad]
    out = function(*arguments)
    return [out, *torch.autograd.grad((out**3).sum(), leaves)]


def cubes(mask):
    return lambda q, k, v, attn_bias, rel_bias: (masked_step(q, k, v, mask, attn_bias, rel_bias) ** 3).sum()


@pytest.mark.parametrize("axes", ((0,), (1, 3), (0, 1, 2, 3)))
def test_gradients_of_expanded_biases(device, axes):
    """That of the expanded tensor has every element, that of what was expanded their sums."""
    full = (BATCH, HEADS, SEQLEN, SEQLEN)
    q, k, v = dense_inputs(device, 3)
    bias = randn(device, *(1 if i in axes else n for i, n in enumerate(full)))
    expanded = bias.expand(full)
    results = flash_attn_func(q, k, v, attn_bias=expanded, return_attn_probs=True)
    check_step(results, lambda d: expected(q, k, v, None, None, 0, d, attn_bias=expanded), [q, expanded, bias])


def test_compiled_apply_keeps_the_gradient_of_a_bias(device):
    """Within which torch sees no tensor of a record: the call is left to eager execution."""

    def step(q, k, v, bias):
        rest = (0.0, None, False, (-1, -1), 0.0, None, False, False, True, None, Options(attn_bias=bias))
        return FlashAttnFunc.apply(q, k, v, *rest)

    arguments = [*dense_inputs(device, 3), randn(device, SEQLEN, SEQLEN)]
    compiled = gradients(torch.compile(step, backend="eager"), arguments)
    for ours, right in zip(compiled, gradients(step, arguments)):
        torch.testing.assert_close(ours, right)


@pytest.mark.parametrize("kind", ("mask", "blocks", "tensor"))
def test_compilers_and_transforms(device, kind):
    """torch.compile, torch.func, make_fx and checkpoints give the eager results; new contents compile nothing."""
    if kind == "blocks" and device == "cuda":
        pytest.skip("CUDA takes blocks of multiples of 64, here they have 16")
    arguments = step_arguments(device, kind)
    eager = gradients(masked_step, arguments)
    q, k, v, mask, attn_bias, rel_bias = arguments
    floats = (q, k, v, attn_bias, rel_bias)
    compiled = torch.compile(masked_step, backend="aot_eager", fullgraph=True)
    runs = {
        "compile": gradients(compiled, arguments),
        "expanded": gradients(compiled, [q, k, v, mask, attn_bias.expand(BATCH, HEADS, SEQLEN, SEQLEN), rel_bias]),
        "checkpoint": gradients(lambda *given: checkpoint(masked_step, *given, use_reentrant=False), arguments),
        "grad": [eager[0], *torch.func.grad(cubes(mask), argnums=tuple(range(5)))(*floats)],
    }
    graph = make_fx(lambda *given: torch.autograd.grad(cubes(mask)(*given), given))(*floats)
    assert {"flash_attn_core.fwd.default", "flash_attn_core.bwd.default"} <= {str(n.target) for n in graph.graph.nodes}
    runs["make_fx"] = [eager[0], *graph(*floats)]
    leaves = {"expanded": [q, k, v, rel_bias]}
    for name, ours in runs.items():
        right = eager
        if name in leaves:  # the gradient of an expanded bias comes in its leaf, which is no argument
            right = [*eager[:4], eager[5]]
            ours = [*ours[:4], ours[-1]]
        for mine, theirs in zip(ours, right):
            torch.testing.assert_close(mine, theirs, msg=lambda text, name=name: f"{name}: {text}")
    with torch.compiler.set_stance("fail_on_recompile"):
        changed = step_arguments(device, kind)
        torch.testing.assert_close(compiled(*changed), masked_step(*changed))


def test_vmap(device):
    """Each sample has a mask and a bias, or all samples share one."""
    q = randn(device, 3, BATCH, SEQLEN, HEADS, DIM)
    seen = torch.rand(3, BATCH, 1, SEQLEN, SEQLEN, device=device) > 0.4
    attn_bias = randn(device, HEADS, 1, SEQLEN)

    def loss(attn_bias, q, seen):
        return (flash_attn_func(q, q, q, mask=seen, attn_bias=attn_bias) ** 3).sum()

    ours = torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(attn_bias, q, seen)
    for i in range(3):
        torch.testing.assert_close(ours[i], torch.autograd.grad(loss(attn_bias, q[i], seen[i]), attn_bias)[0])


def test_operators_pass_opcheck(device):
    q, k, v, _, attn_bias, rel_bias = step_arguments(device, "tensor")
    fields = flash_attn.ops.attention_args.AttentionArgs._fields
    given = dict.fromkeys(fields)
    ranges = torch.tensor([3, 30], dtype=torch.int32, device=device).expand(1, 1, SEQLEN, 2).contiguous()
    given.update(
        q=q, k=k, v=v, max_seqlen_q=0, max_seqlen_k=0, dropout_p=0.0, softmax_scale=0.3, causal=True, window_left=-1,
        window_right=-1, softcap=0.0, deterministic=False, return_softmax=False, return_max_logit=False,
        batch_invariant=False, v_per_channel=False, fast_exp=False, sm_margin=0, mask_query_ranges=ranges,
        mask_block_q=0, mask_block_k=0, attn_bias=attn_bias, rel_bias=rel_bias,
    )  # fmt: skip
    utils = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.flash_attn_core.fwd.default, tuple(given.values()), test_utils=utils)


@pytest.mark.parametrize("name", ("mask", "attn_bias", "rel_bias"))
def test_a_change_before_the_backward_is_an_error(device, name):
    arguments = dict(zip(inspect.signature(masked_step).parameters, step_arguments(device, "mask")))
    out = masked_step(**arguments)
    changed = arguments[name]
    changed = next(iter(changed.factors.tensors().values())) if name == "mask" else changed
    with torch.no_grad():
        changed.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_gradients_only_for_biases_that_ask(device, monkeypatch):
    """Of a constant bias the backend sums none."""
    backend, seen = backends.get(device), []
    bwd = backend.bwd
    monkeypatch.setattr(backend, "bwd", lambda *args, **named: [seen.append(named), bwd(*args, **named)][1])
    q, k, v, mask, attn_bias, rel_bias = step_arguments(device, "mask")
    constant = attn_bias.detach()
    masked_step(q, k, v, mask, constant, None).sum().backward()
    assert seen[-1]["bias_grad"] is False and q.grad is not None
    q_constant, k_constant, v_constant = (x.detach() for x in (q, k, v))
    masked_step(q_constant, k_constant, v_constant, None, constant, rel_bias).sum().backward()
    assert "bias_grad" not in seen[-1] and rel_bias.grad is not None and constant.grad is None


def test_plain_calls_pass_nothing_by_name(device, monkeypatch):
    """So a backend without these arguments computes them."""
    backend, seen = backends.get(device), {}
    for name in ("fwd", "varlen_fwd", "bwd", "varlen_bwd"):
        function = getattr(backend, name)

        def recorded(*args, name=name, function=function, **named):
            seen[name] = named
            return function(*args, **named)

        monkeypatch.setattr(backend, name, recorded)
    q, k, v = dense_inputs(device, 3)
    cu = cumulative(device, (BATCH * SEQLEN,))
    packed = flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), cu, cu, BATCH * SEQLEN, BATCH * SEQLEN)
    with by_function():
        (flash_attn_func(q, k, v).sum() + packed.sum()).backward()
    assert seen == dict.fromkeys(("fwd", "varlen_fwd", "bwd", "varlen_bwd"), {})


def test_minus_infinity_hides(device):
    """With a row that sees nothing."""
    q, k, v = dense_inputs(device, 3)
    seen = torch.rand(SEQLEN, SEQLEN, device=device) > 0.4
    seen[5] = False
    bias = torch.zeros(SEQLEN, SEQLEN, device=device).masked_fill(~seen, -math.inf)
    for ours, right in zip(
        flash_attn_func(q, k, v, attn_bias=bias, return_attn_probs=True),
        flash_attn_func(q, k, v, mask=seen, return_attn_probs=True),
    ):
        torch.testing.assert_close(ours, right)


def test_explain(device):
    keep = torch.ones(SEQLEN, device=device)
    mask = AttentionMask.key_padding(keep.bool())
    plans = flash_attn.explain(flash_attn_func, *dense_inputs(device, 3), mask=mask)
    assert plans["forward"]["kernel"] == "tiled" or device == "cuda"
    assert plans["backward"] is not None


@pytest.mark.parametrize(
    "given,message",
    (
        ({"mask": 3}, "mask: expected an AttentionMask or a bool Tensor, got int"),
        ({"mask": torch.zeros(3)}, "mask: expected an AttentionMask or dtype bool; numbers are an attn_bias"),
        ({"mask": torch.ones(37, 37, dtype=torch.bool).to_sparse()}, "mask: expected a strided Tensor, got a sparse"),
        ({"attn_bias": [1.0]}, "attn_bias: expected a Tensor, got list"),
        ({"attn_bias": torch.ones(37, 37, dtype=torch.bool)}, "attn_bias: expected numbers"),
        ({"attn_bias": torch.ones(36)}, "attn_bias: expected shape"),
        ({"rel_bias": 1.0}, "rel_bias: expected a Tensor, got float"),
        ({"rel_bias": torch.ones(4, 4)}, r"rel_bias: expected shape \[4, 2 R \+ 1\]"),
        ({"mask": torch.ones(1, 1, 36, 37, dtype=torch.bool)}, "mask: expected a mask for seqlen_q 37, got one for 36"),
        ({"mask": torch.ones(37, 40, dtype=torch.bool)}, "mask: expected a mask for seqlen_k 37, got one for 40"),
    ),
)
def test_errors_name_the_argument(device, given, message):
    given = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    with pytest.raises((RuntimeError, TypeError), match=f"^{message}"):
        flash_attn_func(*dense_inputs(device, 3), **given)


def packed_scores(device, kind):
    """A mask or bias of LONGEST columns: fewer than the keys of all sequences."""
    if kind == "attn_bias":
        return {kind: randn(device, HEADS, TOTAL, LONGEST, grad=False)}
    seen = torch.rand(1, TOTAL, LONGEST, device=device) > 0.4
    return {"mask": seen if kind == "bool" else AttentionMask.from_tensor(seen, packed=True)}


@pytest.mark.parametrize("kind", ("attn_bias", "bool", "bits"))
def test_longest_sequence_as_a_tensor(device, kind):
    """Its value stays on the device: the columns say how long sequences are."""
    q, k, v = (randn(device, TOTAL, h, DIM, grad=False) for h in (HEADS, HEADS_K, HEADS_K))
    cu, options = cumulative(device), packed_scores(device, kind)
    longest = torch.tensor(LONGEST, device=device)
    ours = flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, **options)
    assert torch.equal(ours, flash_attn_varlen_func(q, k, v, cu, cu, LONGEST, LONGEST, **options))


@pytest.mark.parametrize("kind", ("attn_bias", "bits", "both", "with rel_bias"))
def test_longest_sequence_of_no_keys(device, kind):
    """Keys belong to no sequence, and masks and biases have no columns."""
    q, k, v = (randn(device, TOTAL, h, DIM) for h in (HEADS, HEADS_K, HEADS_K))
    cu, empty, options = cumulative(device), cumulative(device, (0, 0, 0)), {}
    if kind != "bits":
        options["attn_bias"] = randn(device, 1, TOTAL, 0)
    if kind in ("bits", "both"):
        options["mask"] = AttentionMask.from_tensor(
            torch.ones(1, TOTAL, 0, dtype=torch.bool, device=device), packed=True
        )
    if kind == "with rel_bias":
        options["rel_bias"] = rel_bias_of(device)
    out, lse, _ = flash_attn_varlen_func(q, k, v, cu, empty, LONGEST, 0, return_attn_probs=True, **options)
    assert not out.any() and (lse == math.inf).all()
    leaves = [q, k, v, *(x for name, x in options.items() if name != "mask")]
    for leaf, grad in zip(leaves, torch.autograd.grad(out, leaves, torch.randn_like(out))):
        assert grad.shape == leaf.shape and not grad.any()


@pytest.mark.parametrize("kind", ("bits", "expanded", "packed"))
def test_no_heads(device, kind):
    """Masks and biases of as many heads as q."""
    shape, cu = (0, 5, 5) if kind == "packed" else (2, 0, 4, 5), cumulative(device, (5,))
    sees = torch.ones(1, dtype=torch.bool, device=device).expand(shape)
    mask = AttentionMask.from_tensor(sees.contiguous() if kind == "bits" else sees, packed=kind == "packed")
    options = {"mask": mask, "attn_bias": randn(device, *shape), "rel_bias": torch.zeros(0, 3, device=device)}
    leaves = [randn(device, *shape[:-3], n, 0, DIM) for n in (shape[-2], 5, 5)]
    if kind == "packed":
        out = flash_attn_varlen_func(*leaves, cu, cu, 5, 5, **options)
    else:
        out = flash_attn_func(*leaves, **options)
    leaves.append(options["attn_bias"])
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert out.shape == leaves[0].shape and [x.shape for x in grads] == [x.shape for x in leaves]


def test_masks_for_other_lengths(device):
    """Also where their words of bits have the shape that the call needs."""
    q, k, v = dense_inputs(device, 3)
    documents = AttentionMask.documents(torch.tensor([0, 3, SEQLEN - 1], device=device), SEQLEN - 1)
    bits = AttentionMask.from_tensor(torch.rand(SEQLEN, SEQLEN + 3, device=device) > 0.4)
    for mask, length in ((documents, "seqlen_q"), (bits, "seqlen_k")):
        with pytest.raises(RuntimeError, match=f"^mask: expected a mask for {length} {SEQLEN}, got one for"):
            flash_attn_func(q, k, v, mask=mask)
    q, k, v = (randn(device, TOTAL, h, DIM) for h in (HEADS, HEADS_K, HEADS_K))
    seen, cu = packed_scores(device, "bool")["mask"], cumulative(device)
    for more in ({}, {"seqused_q": torch.tensor([7, 0, 11], device=device)}):
        with pytest.raises(RuntimeError, match="^mask: expected a mask for max_seqlen_k 30, got one for 20"):
            flash_attn_varlen_func(q, k, v, cu, cu, LONGEST, 30, mask=seen, **more)
