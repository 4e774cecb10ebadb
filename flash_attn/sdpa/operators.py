"""PyTorch's flash attention operators, aten::_scaled_dot_product_flash_attention and its sisters, by our backends.

Each function has the signature, results and strides of the operator, which torch's meta functions promise to compilers:
out and the gradients are laid out as the inputs. For all of them is_causal is aligned to the bottom right corner, as
here: SDPA, whose is_causal is aligned to the top left, sends causal calls only where seqlen_q == seqlen_k; the others
come from `torch.nn.attention.bias.causal_lower_right`.
rng_state is uint64 (2,) at torch and int64 (2,) at the backends, of the same bits; the offset lies in its second word,
so that the second result of the generator, unused, is empty.
"""

from __future__ import annotations

import torch

from flash_attn import backends
from flash_attn.batch_invariance import is_batch_invariant
from flash_attn.ops import calls
from flash_attn.ops.attention_args import AttentionBackwardArgs

_WITHOUT_BACKWARD = "expected None in training, got a tensor: it has no backward"


def _scale(scale: float | None, query: torch.Tensor) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale


def _writable(out: torch.Tensor) -> torch.Tensor:
    """out, or a tensor like it with the contiguous last dimension that backends write, to be copied to out."""
    return out if out.stride(-1) == 1 else torch.empty_like(out, memory_format=torch.contiguous_format)


def _window(left: int | None, right: int | None) -> tuple[int, int]:
    return -1 if left is None else left, -1 if right is None else right


def _random_results(query: torch.Tensor, rng_state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return rng_state.view(torch.uint64), torch.empty((), dtype=torch.uint64, device=query.device)


def _dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    scale: float | None,
    window: tuple[int, int],
    alibi_slopes: torch.Tensor | None,
    batch_invariant: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Forward of (batch, seqlen, heads, head_dim) -> (out, lse, S_dmask, rng_state). out None: a new contiguous one."""
    target = None if out is None else _writable(out)
    q, k, v = map(calls.rows_contiguous, (q, k, v))
    result, lse, dmask, rng_state = backends.of(q).fwd(
        q,
        k,
        v,
        target,
        alibi_slopes,
        dropout_p,
        scale,
        is_causal,
        *window,
        0.0,
        return_debug_mask,
        None,
        False,
        batch_invariant,
    )
    if out is not None and target is not None and target is not out:
        result = out.copy_(target)
    return result, lse, dmask, rng_state


def _varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    scale: float | None,
    window: tuple[int, int],
    seqused_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    batch_invariant: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Forward of (total, heads, head_dim) into out -> (out, lse, S_dmask, rng_state)."""
    target = _writable(out)
    q, k, v = map(calls.rows_contiguous, (q, k, v))
    if cum_seq_k is None and seqused_k is not None:
        cum_seq_k = cum_seq_q  # pages begin at the block table, lengths stand in seqused_k
    _, lse, dmask, rng_state = backends.of(q).varlen_fwd(
        q,
        k,
        v,
        target,
        cum_seq_q,
        cum_seq_k,
        seqused_k,
        None,
        block_table,
        alibi_slopes,
        max_q,
        max_k,
        dropout_p,
        scale,
        False,
        is_causal,
        *window,
        0.0,
        return_debug_mask,
        None,
        0,
        False,
        batch_invariant,
    )
    if target is not out:
        out.copy_(target)
    return out, lse, dmask, rng_state


def sdpa_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor | int | None, ...]:
    """aten::_scaled_dot_product_flash_attention: query (batch, heads, seqlen_q, head_dim), key and value with heads of
    their own, which divide those of query.
    """
    q = query.transpose(1, 2)
    out = None if q.is_contiguous() else torch.empty_like(query).transpose(1, 2)
    out, lse, dmask, rng_state = _dense(
        q,
        key.transpose(1, 2),
        value.transpose(1, 2),
        out,
        dropout_p,
        is_causal,
        return_debug_mask,
        _scale(scale, query),
        (-1, -1),
        None,
        is_batch_invariant(),
    )
    random = _random_results(query, rng_state)
    return out.transpose(1, 2), lse, None, None, query.shape[2], key.shape[2], *random, dmask


def _gradients(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    rng_state: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    window: tuple[int, int],
    swap: bool,
) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv) like (query, key, value). swap: the axes 1 and 2 of all tensors but lse change places for us."""

    def ours(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2) if swap else x

    gradients = tuple(map(torch.empty_like, (query, key, value)))
    args = AttentionBackwardArgs(  # type: ignore[call-arg]  # mypy sees no defaults in this record
        dout=ours(grad_out),
        dlse=None,
        q=ours(query),
        k=ours(key),
        v=ours(value),
        out=ours(out),
        lse=lse,
        rng_state=rng_state.view(torch.int64),
        cu_seqlens_q=cum_seq_q,
        cu_seqlens_k=cum_seq_k,
        alibi_slopes=None,
        sinks=None,
        max_seqlen_q=max_q,
        max_seqlen_k=max_k,
        dropout_p=dropout_p,
        softmax_scale=_scale(scale, query),
        causal=is_causal,
        window_left=window[0],
        window_right=window[1],
        softcap=0.0,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        batch_invariant=is_batch_invariant(),
    )
    calls.backward_into(args, *map(ours, gradients))
    return gradients


def sdpa_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    """aten::_scaled_dot_product_flash_attention_backward; deterministic where torch's flag asks for it."""
    return _gradients(
        grad_out,
        query,
        key,
        value,
        out,
        logsumexp,
        philox_seed,
        None,
        None,
        0,
        0,
        dropout_p,
        is_causal,
        scale,
        (-1, -1),
        swap=True,
    )


def flash_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """aten::_flash_attention_forward: dense (batch, seqlen, heads, head_dim), with cum_seq_q varlen
    (total, heads, head_dim). num_splits 1 asks for a result that does not depend on the rest of the batch, as torch
    promises; other values change nothing.
    """
    forward_only = {"seqused_k": seqused_k, "block_table": block_table, "alibi_slopes": alibi_slopes}
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        for name, tensor in forward_only.items():
            if tensor is not None:  # torch's backward operator does not take it: gradients would be wrong
                raise NotImplementedError(f"{name}: {_WITHOUT_BACKWARD}")
    out = torch.empty_like(query)
    out, lse, dmask, rng_state = _flash_forward_into(
        out,
        query,
        key,
        value,
        cum_seq_q,
        cum_seq_k,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        return_debug_mask,
        _scale(scale, query),
        _window(window_size_left, window_size_right),
        seqused_k,
        block_table,
        alibi_slopes,
        num_splits,
    )
    return out, lse, *_random_results(query, rng_state), dmask


def flash_forward_inplace(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """aten::_flash_attention_forward_no_dropout_inplace (torch 2.13): `flash_forward` into out -> lse."""
    _, lse, *_ = _flash_forward_into(
        out,
        query,
        key,
        value,
        cum_seq_q,
        cum_seq_k,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        return_debug_mask,
        _scale(scale, query),
        _window(window_size_left, window_size_right),
        seqused_k,
        block_table,
        alibi_slopes,
        num_splits,
    )
    return lse


def _flash_forward_into(
    out: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    scale: float | None,
    window: tuple[int, int],
    seqused_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    num_splits: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    batch_invariant = num_splits == 1 or is_batch_invariant()
    if cum_seq_q is not None:
        assert out is not None
        return _varlen(
            query,
            key,
            value,
            out,
            cum_seq_q,
            cum_seq_k,
            max_q,
            max_k,
            dropout_p,
            is_causal,
            return_debug_mask,
            scale,
            window,
            seqused_k,
            block_table,
            alibi_slopes,
            batch_invariant,
        )
    for name, tensor in (("seqused_k", seqused_k), ("block_table", block_table)):
        if tensor is not None:
            raise RuntimeError(f"{name}: expected None for dense attention, got a tensor")
    return _dense(
        query, key, value, out, dropout_p, is_causal, return_debug_mask, scale, window, alibi_slopes, batch_invariant
    )


def flash_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: torch.Tensor,
    unused: torch.Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """aten::_flash_attention_backward; deterministic where torch's flag asks for it."""
    return _gradients(
        grad_out,
        query,
        key,
        value,
        out,
        logsumexp,
        rng_state,
        cum_seq_q,
        cum_seq_k,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        scale,
        _window(window_size_left, window_size_right),
        swap=False,
    )


OPERATORS = {
    "_scaled_dot_product_flash_attention": sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": sdpa_backward,
    "_flash_attention_forward": flash_forward,
    "_flash_attention_forward_no_dropout_inplace": flash_forward_inplace,
    "_flash_attention_backward": flash_backward,
}
