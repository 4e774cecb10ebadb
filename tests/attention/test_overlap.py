"""Outputs that overlap each other, inputs, or themselves: refused by name, and nothing is written."""

from __future__ import annotations

import pytest
import torch

from flash_attn import KvCachePlan, backends, flash_attn_combine, flash_attn_with_kvcache

B, S, H, HK, D = 2, 9, 4, 2, 16
DTYPE = torch.bfloat16
ITSELF = "elements that do not overlap each other"


def normal(device, *shape):
    return torch.randn(*shape, device=device).to(DTYPE)


def refuses(name, other, call, *tensors):
    """The call names the argument and what it overlaps; the tensors stay as they are."""
    before = [x.clone() for x in tensors]
    expected = ITSELF if other is None else f"memory that does not overlap {other}, got elements of both"
    with pytest.raises(RuntimeError, match=f"^{name}: expected {expected}"):
        call()
    assert all(torch.equal(x, y) for x, y in zip(tensors, before))


def inputs(device):
    return normal(device, B, S, H, D), normal(device, B, S, HK, D), normal(device, B, S, HK, D)


def forward(q, k, v, out=None):
    return backends.get(q.device.type).fwd(q, k, v, out, None, 0.0, 0.25, False, -1, -1, 0.0, False, None)


def varlen_forward(q, k, v, out):
    cu = torch.tensor([0, 4, S], dtype=torch.int32, device=q.device)
    return backends.get(q.device.type).varlen_fwd(
        q, k, v, out, cu, cu, None, None, None, None, S, S, 0.0, 0.25, False, False, -1, -1, 0.0, False, None
    )


def test_out_of_the_forward(device):
    q, k, v = inputs(device)
    for call, (a, b, c) in ((forward, (q, k, v)), (varlen_forward, (q[0], k[0], v[0]))):
        refuses("out", None, lambda call=call, a=a, b=b, c=c: call(a, b, c, a[..., :1, :].expand(a.shape)), q, k, v)
        refuses("out", "q", lambda call=call, a=a, b=b, c=c: call(a, b, c, a), q, k, v)
    expanded = torch.empty(1, S, H, D, device=device, dtype=DTYPE).expand(B, -1, -1, -1)
    refuses("out", None, lambda: forward(q, k, v, expanded), q, k, v)
    overlapping = torch.zeros(B * S * H * D, device=device, dtype=DTYPE)
    by_one = overlapping.as_strided((B, S, H, D), (S * H * D - 1, H * D, D, 1))
    refuses("out", None, lambda: forward(q, k, v, by_one), q, k, v)
    # Memory that begins in the last row of k, and in v.
    for name, x in (("k", k), ("v", v)):
        buffer = torch.cat([x.flatten(), x.new_zeros(q.numel())])
        given = {"k": k, "v": v, name: buffer[: x.numel()].view(x.shape)}
        out = buffer[x.numel() - 8 :][: q.numel()].view(q.shape)
        refuses("out", name, lambda given=given, out=out: forward(q, given["k"], given["v"], out), buffer)


def test_out_and_the_inputs_in_one_buffer(device):
    """Address ranges that interleave are not an overlap."""
    for axis in (2, 3):
        buffer = torch.stack(
            [*(normal(device, B, S, H, D) for _ in "qkv"), torch.zeros(B, S, H, D, device=device)], axis
        )
        buffer = buffer.to(DTYPE)
        q, k, v, out = buffer.unbind(axis)
        expected = forward(q.contiguous(), k.contiguous(), v.contiguous())[0]
        forward(q, k, v, out)
        assert torch.equal(out, expected)


def backward(q, k, v, dq=None, dk=None, dv=None, dout=None):
    out, lse = forward(q, k, v)[:2]
    dout = torch.ones_like(out) if dout is None else dout
    return backends.get(q.device.type).bwd(
        dout, q, k, v, out, lse, dq, dk, dv, None, 0.0, 0.25, False, -1, -1, 0.0, True, None, None
    )


def test_gradients(device):
    q, k, v = inputs(device)
    buffer = torch.zeros(4 * q.numel(), device=device, dtype=DTYPE)

    def at(start, like):
        return buffer[start : start + like.numel()].view(like.shape)

    def refused(name, other, dout=None, **gradients):
        refuses(name, other, lambda: backward(q, k, v, dout=dout, **gradients), q, k, v, buffer)

    for name, like in (("dq", q), ("dk", k), ("dv", v)):
        refused(name, None, **{name: like[:1].expand(like.shape)})
        refused(name, name[1], **{name: like})
        refused(name, "dout", dout=at(0, q), **{name: at(8, like)})
    refused("dk", "dq", dq=at(0, q), dk=at(q.numel() - 8, k))
    refused("dv", "dq", dq=at(0, q), dv=at(q.numel() - 8, v))
    refused("dv", "dk", dk=at(0, k), dv=at(8, v))


@pytest.mark.parametrize("axis", (2, 3), ids=("three_first", "heads_first"))
def test_gradients_in_one_buffer(device, axis):
    q, k, v = (normal(device, B, S, H, D) for _ in "qkv")
    expected = backward(q, k, v)
    buffer = torch.stack([torch.zeros_like(q)] * 3, axis)
    backward(q, k, v, *buffer.unbind(axis))
    assert all(torch.equal(x, y) for x, y in zip(buffer.unbind(axis), expected))


def cache_call(q, k_cache, v_cache, k=None, v=None, **options):
    lengths = torch.full((q.shape[0],), 3, dtype=torch.int32, device=q.device)
    return flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, **options)


def test_caches_that_receive_rows(device):
    q, k, v = normal(device, B, 1, H, D), normal(device, B, 1, HK, D), normal(device, B, 1, HK, D)
    k_cache, v_cache = normal(device, B, S, HK, D), normal(device, B, S, HK, D)
    for x in (k_cache[:1].expand(B, -1, -1, -1), k_cache[:, :, :1].expand(-1, -1, HK, -1)):
        refuses("k_cache", None, lambda x=x: cache_call(q, x, v_cache, k, v), k_cache, v_cache)
        refuses("v_cache", None, lambda x=x: cache_call(q, v_cache, x, k, v), k_cache, v_cache)
        cache_call(q, x, x)  # they may be read
    refuses("v_cache", "k_cache", lambda: cache_call(q, k_cache, k_cache, k, v), k_cache)
    cos = torch.ones(S, D // 2, device=device, dtype=DTYPE)
    angles = {"rotary_cos": cos, "rotary_sin": cos}
    refuses("v_cache", "k_cache", lambda: cache_call(q, k_cache, k_cache, k, k, **angles), k_cache)
    refuses("k_cache", "k", lambda: cache_call(q, k_cache, v_cache, k_cache[:, :1], v), k_cache, v_cache)
    refuses("v_cache", "v", lambda: cache_call(q, k_cache, v_cache, k, v_cache[:, :1]), k_cache, v_cache)
    refuses("v_cache", "q", lambda: cache_call(v_cache[:, :1], k_cache, v_cache, k, v), k_cache, v_cache)


def test_one_cache_for_keys_and_values(device):
    """The same rows go to the same place: nothing is written twice."""
    q, k = normal(device, B, 1, H, D), normal(device, B, 1, HK, D)
    cache, other = (normal(device, 1, S, HK, D).repeat(B, 1, 1, 1) for _ in "kv")
    other.copy_(cache)
    expected = cache_call(q, other.clone(), other.clone(), k, k)
    assert torch.equal(cache_call(q, cache, cache, k, k), expected)
    assert torch.equal(cache[:, 3:4], k)


def test_caches_in_one_buffer(device):
    q, k, v = normal(device, B, 1, H, D), normal(device, B, 1, HK, D), normal(device, B, 1, HK, D)
    buffer = normal(device, B, S, 2, HK, D)
    k_cache, v_cache = (x.clone() for x in buffer.unbind(2))
    assert torch.equal(cache_call(q, *buffer.unbind(2), k, v), cache_call(q, k_cache, v_cache, k, v))
    assert torch.equal(buffer, torch.stack([k_cache, v_cache], 2))


def test_out_over_a_cache(device):
    q, k_cache, v_cache = normal(device, B, 1, H, D), normal(device, B, S, HK, D), normal(device, B, S, HK, D)
    refuses("out", None, lambda: cache_call(q, k_cache, v_cache, out=q[:1].expand(q.shape)), q)
    refuses("out", "q", lambda: cache_call(q, k_cache, v_cache, out=q), q)
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        out = x.view(-1)[3 * D :][: q.numel()].view(q.shape)
        refuses("out", name, lambda out=out: cache_call(q, k_cache, v_cache, out=out), x)


def test_out_over_a_plan(device):
    q, k_cache, v_cache = normal(device, B, 1, 1, 8), normal(device, B, S, 1, 8), normal(device, B, S, 1, 8)
    plan = KvCachePlan(torch.full((B,), 3, dtype=torch.int32, device=device), 1, 1, 1, 8, S)
    out = plan.tensor[:8].view(DTYPE).view(q.shape)
    refuses("plan", "out", lambda: cache_call(q, k_cache, v_cache, plan=plan, out=out), plan.tensor)
    refuses("plan", "cache_seqlens", lambda: plan.update(plan.tensor[1 : 1 + B]), plan.tensor)


def test_out_of_the_merge(device):
    parts, lse = torch.randn(3, B, S, H, D, device=device), torch.randn(3, B, S, H, device=device)
    refuses("out", None, lambda: flash_attn_combine(parts, lse, out=parts[0, :1].expand(B, -1, -1, -1)), parts)
    refuses("out", "out_partial", lambda: flash_attn_combine(parts, lse, out=parts[1]), parts)
    buffer = torch.stack([*parts, torch.zeros_like(parts[0])], 1)
    flash_attn_combine(buffer[:, :3].transpose(0, 1), lse, out=buffer[:, 3])
    assert torch.equal(buffer[:, 3], flash_attn_combine(parts, lse)[0])
