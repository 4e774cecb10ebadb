"""Features of the backends for context parallelism, on both devices and in both kernel families: origins of scores, and
gradients of keys that are added to float32 tensors."""

from __future__ import annotations

import pytest
import torch
from cp_kernel_harness import LENGTHS, ORIGINS, STATE, Call, P, close, half

from flash_attn import backends
from flash_attn.dropout import dropout_streams, dropout_threshold, keep_mask, keep_scale


@pytest.fixture(params=("wgmma", "mma_sync"))
def family(request, device, monkeypatch):
    if device == "cpu" and request.param != "wgmma":
        pytest.skip("the CPU backend has one family")
    monkeypatch.setenv("FLASH_ATTN_FAMILY", request.param)


def kept(origin, heads, rows, cols):
    """bool (heads, rows, cols): the part of the whole matrix's mask from this origin on."""
    document, head, row, col = origin
    streams = dropout_streams(*STATE, [document], range(head, head + heads))
    return keep_mask(streams, row, row + rows, col, col + cols, dropout_threshold(P))[0]


@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("with_alibi", [False, True], ids=["plain", "alibi"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_dropout_mask_is_a_part_of_the_whole(device, family, head_dim, with_alibi, is_packed):
    """With equal probabilities and one-hot values each element of out is a bit of the mask. With one-hot gradients of
    out each element of dv is one."""
    call = Call(device, is_packed, (3, 3), (head_dim, head_dim))
    call.q.zero_()
    slopes = torch.zeros(3, device=device) if with_alibi else None
    masks = [kept(o, 3, *length).to(device) for o, length in zip(ORIGINS, call.lengths)]
    eye = torch.eye(head_dim, dtype=call.q.dtype, device=device)[:, None].expand(-1, 3, -1)
    for start in range(0, max(n for _, n in call.lengths), head_dim):
        call.v.zero_()
        call.dout.zero_()
        for values, grads in zip(call.sequences(call.v, False), call.sequences(call.dout, True)):
            values[start : start + head_dim] = eye[: max(0, len(values) - start)]
            grads[start : start + head_dim] = eye[: max(0, len(grads) - start)]
        out, lse, *_ = call.forward(slopes, dropout=P)
        _, _, dv = call.backward(out, lse, slopes, dropout=P)
        outs, dvs = call.sequences(out, True), call.sequences(dv, False)
        for mask, rows, cols in zip(masks, outs, dvs):
            expected = torch.zeros(rows.shape, dtype=torch.bool, device=device)
            part = mask[:, :, start : start + head_dim].permute(1, 0, 2)
            expected[:, :, : part.shape[2]] = part
            assert torch.equal(rows != 0, expected)
            scales = rows[rows != 0].double()
            torch.testing.assert_close(
                scales, torch.full_like(scales, keep_scale(P) / mask.shape[2]), rtol=2**-7, atol=0
            )
            expected = torch.zeros(cols.shape, dtype=torch.bool, device=device)
            part = mask[:, start : start + head_dim].permute(2, 0, 1)
            expected[:, :, : part.shape[2]] = part
            assert torch.equal(cols != 0, expected)


FEATURES = {
    "alibi": {"slopes": True},
    "alibi, window": {"slopes": True, "window": (100, 30)},
    "dropout": {"dropout": P},
    "both, causal": {"slopes": True, "dropout": P, "window": (-1, 0)},
}


@pytest.mark.each
@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("heads, head_dims", [((4, 2), (64, 64)), ((3, 3), (128, 128)), ((2, 1), (40, 24))])
def test_a_part_equals_that_of_the_float64_reference(device, family, heads, head_dims, features, is_packed):
    features = dict(features)
    call = Call(device, is_packed, heads, head_dims)
    slopes = torch.rand(len(LENGTHS), heads[0], device=device) * 0.02 if features.pop("slopes", False) else None
    call.origins[1, 3] = 32  # bias within reach of all scores
    reference = call.reference()
    their_slopes = None if slopes is None else slopes.cpu()
    out, lse, *_ = call.forward(slopes, **features)
    expected = reference.forward(their_slopes, **features)
    close(out, expected[0], "out")
    close(lse, expected[1], "lse")
    grads = call.backward(out, lse, slopes, **features)
    theirs = reference.backward(*expected[:2], their_slopes, **features)
    for name, ours, other in zip(("dq", "dk", "dv"), grads, theirs):
        close(ours, other, name)


def test_one_query_with_an_origin(device):
    """Decode kernels do not support origins: prefill kernels compute it."""
    call = Call(device, True, (8, 2), (64, 64), ((1, 4096), (1, 2048)))
    call.origins[:] = torch.tensor([[0, 0, 3000, 512], [0, 0, 100, 48]])
    slopes = torch.rand(8, device=device) * 0.01
    out, lse, *_ = call.forward(slopes)
    expected, their_lse, *_ = call.reference().forward(slopes.cpu())
    close(out, expected, "out")
    close(lse, their_lse, "lse")


SUMS = {"plain": {}, "causal": {"window": (-1, 0)}, "both": {"slopes": True, "dropout": P}}


@pytest.mark.each
@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("features", SUMS.values(), ids=SUMS)
@pytest.mark.parametrize("heads, head_dims", [((4, 2), (64, 64)), ((3, 3), (128, 128)), ((2, 1), (40, 24))])
def test_gradients_of_keys_are_added_in_float32(device, family, heads, head_dims, features, is_packed):
    """Before they are rounded, and to tensors with any strides; rows of no sequence stay."""
    features = dict(features)
    call = Call(device, is_packed, heads, head_dims, extra_rows=5 if is_packed else 0)
    slopes = torch.rand(heads[0], device=device) * 0.02 if features.pop("slopes", False) else None
    out, lse, *_ = call.forward(slopes, **features)
    _, *rounded = call.backward(out, lse, slopes, **features)
    dtype = torch.float64 if call.q.dtype == torch.float64 else torch.float32
    sums = [torch.zeros((*x.shape[:-1], 2 * x.shape[-1]), dtype=dtype, device=device) for x in (call.k, call.v)]
    sums = [x[..., : x.shape[-1] // 2] for x in sums]
    grads = call.backward(out, lse, slopes, grads=(None, *sums), accumulate_dkv=True, **features)
    first = [x.clone() for x in sums]
    for ours, given, theirs in zip(grads[1:], sums, rounded):
        assert ours.data_ptr() == given.data_ptr() and ours.dtype == dtype
        tolerance = 2**-8 * theirs.abs().max().item()  # a probability may be rounded to either side
        torch.testing.assert_close(ours.to(theirs.dtype), theirs, rtol=2**-7, atol=tolerance)
        if device == "cuda":
            assert not torch.equal(ours, ours.to(theirs.dtype).float())  # more digits than bfloat16 has
    call.backward(out, lse, slopes, grads=(None, *sums), accumulate_dkv=True, **features)
    for twice, once in zip(sums, first):
        assert torch.equal(twice, 2 * once)
    if is_packed:
        for given in sums:
            given[-5:] = 7.0
        call.backward(out, lse, slopes, grads=(None, *sums), accumulate_dkv=True, **features)
        assert all((given[-5:] == 7.0).all() for given in sums)


def test_sums_in_unaligned_views(device):
    """Their rows do not begin at multiples of 16 bytes, so kernels cannot write them."""
    call = Call(device, True, (2, 2), (64, 64))
    out, lse, *_ = call.forward()
    dtype = torch.float64 if device == "cpu" else torch.float32
    aligned = [torch.ones(x.shape, dtype=dtype, device=device) for x in (call.k, call.v)]
    offset = [torch.ones((*x.shape[:-1], 65), dtype=dtype, device=device)[..., 1:] for x in (call.k, call.v)]
    for sums in (aligned, offset):
        call.backward(out, lse, grads=(None, *sums), accumulate_dkv=True)
    for a, b in zip(aligned, offset):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        assert not torch.equal(a, torch.ones_like(a))


BAD = [
    ({"accumulate_dkv": True}, (None, None, None), "dk: expected a tensor with accumulate_dkv"),
    ({"accumulate_dkv": True}, (None, torch.float16, torch.float16), "dk: expected"),
    ({"origins": (2, 4)}, (None, None, None), r"origins: expected shape \[3, 4\]"),
    ({"origins": "int32"}, (None, None, None), "origins: expected"),
]


@pytest.mark.parametrize("named, grads, message", BAD, ids=["none", "dtype", "shape", "origins"])
@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
def test_bad_sums_and_origins(device, is_packed, named, grads, message):
    call = Call(device, is_packed, (2, 2), (64, 64))
    out, lse, *_ = call.forward()
    named = dict(named)
    if "origins" in named:
        named["origins"] = call.origins.int() if named["origins"] == "int32" else call.origins[:2]
    grads = [None if x is None else torch.zeros(call.k.shape, dtype=x, device=device) for x in grads]
    with pytest.raises(RuntimeError, match=message):
        call.backward(out, lse, grads=grads, **named)


def test_origins_over_a_cache_raise(device):
    q = torch.randn(1, 1, 2, 64, dtype=half(device), device=device)
    cache = torch.randn(1, 64, 2, 64, dtype=half(device), device=device)
    origins = torch.zeros(1, 4, dtype=torch.int64, device=device)
    with pytest.raises(RuntimeError, match="origins: expected None over a KV cache"):
        backends.of(q).fwd_kvcache(
            q, cache, cache, *(None,) * 10, 1.0, False, -1, -1, 0.0, False, 0, origins=origins
        )  # fmt: skip
