"""PyTorch's flash attention operators, aten::_scaled_dot_product_flash_attention and its sisters, by our backends.

Each function has the signature, results and strides of the operator, which torch's meta functions promise to compilers:
out and the gradients are laid out as the inputs. For all of them is_causal is aligned to the bottom right corner, as
here: SDPA, whose is_causal is aligned to the top left, sends causal calls only where seqlen_q == seqlen_k; the others
come from `torch.nn.attention.bias.causal_lower_right`.
rng_state is uint64 (2,) at torch and int64 (2,) at the backends, of the same bits; the offset lies in its second word,
so that the second result of the generator, unused, is empty.
"""

from __future__ import annotations

from typing import Any

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
        q, k, v, target, alibi_slopes, dropout_p, scale, is_causal, *window, 0.0, return_debug_mask, None, False,
        batch_invariant,
    )  # fmt: skip
    if out is not None and target is not None and target is not out:
        result = out.copy_(target)
    return result, lse, dmask, rng_state


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
    options = dropout_p, is_causal, return_debug_mask, _scale(scale, query), (-1, -1), None, is_batch_invariant()
    out, lse, dmask, rng_state = _dense(q, key.transpose(1, 2), value.transpose(1, 2), out, *options)
    random = _random_results(query, rng_state)
    return out.transpose(1, 2), lse, None, None, query.shape[2], key.shape[2], *random, dmask


def _gradients(
    swap: bool,
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
    """(dq, dk, dv) like (query, key, value), deterministic where torch's flag asks for it; the arguments are those of
    aten::_flash_attention_backward. swap: the axes 1 and 2 of all tensors but logsumexp change places for us."""

    def ours(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2) if swap else x

    gradients = tuple(map(torch.empty_like, (query, key, value)))
    window_left, window_right = _window(window_size_left, window_size_right)
    args = AttentionBackwardArgs(  # type: ignore[call-arg]  # mypy sees no defaults in this record
        dout=ours(grad_out),
        dlse=None,
        q=ours(query),
        k=ours(key),
        v=ours(value),
        out=ours(out),
        lse=logsumexp,
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
        window_left=window_left,
        window_right=window_right,
        softcap=0.0,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        batch_invariant=is_batch_invariant(),
    )
    calls.backward_into(args, *map(ours, gradients))
    return gradients


def sdpa_backward(*arguments: Any, scale: float | None = None) -> tuple[torch.Tensor, ...]:
    """aten::_scaled_dot_product_flash_attention_backward, a dense call: its lengths (arguments 6 to 9) are not used."""
    arguments = (*arguments[:6], None, None, 0, 0, *arguments[10:])
    return _gradients(True, *arguments, scale=scale)


def flash_backward(*arguments: Any, **options: Any) -> tuple[torch.Tensor, ...]:
    """aten::_flash_attention_backward."""
    return _gradients(False, *arguments, **options)


def flash_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *arguments: Any, **options: Any
) -> tuple[torch.Tensor, ...]:
    """aten::_flash_attention_forward."""
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        for name in ("seqused_k", "block_table", "alibi_slopes"):
            if options.get(name) is not None:  # torch's backward operator does not take it: gradients would be wrong
                raise NotImplementedError(f"{name}: {_WITHOUT_BACKWARD}")
    out, lse, dmask, rng_state = _flash_forward(torch.empty_like(query), query, key, value, *arguments, **options)
    return out, lse, *_random_results(query, rng_state), dmask


def flash_forward_inplace(*arguments: Any, **options: Any) -> torch.Tensor:
    """aten::_flash_attention_forward_no_dropout_inplace (torch 2.13): `flash_forward` into out -> lse."""
    return _flash_forward(*arguments, **options)[1]


def _flash_forward(
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, lse, S_dmask, rng_state) of dense (batch, seqlen, heads, head_dim), with cum_seq_q varlen (total, heads,
    head_dim). num_splits 1 asks for a result that does not depend on the rest of the batch, as torch promises; other
    values change nothing.
    """
    batch_invariant = num_splits == 1 or is_batch_invariant()
    scale, window = _scale(scale, query), _window(window_size_left, window_size_right)
    if cum_seq_q is None:
        for name, tensor in (("seqused_k", seqused_k), ("block_table", block_table)):
            if tensor is not None:
                raise RuntimeError(f"{name}: expected None for dense attention, got a tensor")
        options = dropout_p, is_causal, return_debug_mask, scale, window, alibi_slopes, batch_invariant
        return _dense(query, key, value, out, *options)
    target = _writable(out)
    q, k, v = map(calls.rows_contiguous, (query, key, value))
    if cum_seq_k is None and seqused_k is not None:
        cum_seq_k = cum_seq_q  # never read: pages come from the block table, lengths from seqused_k
    _, lse, dmask, rng_state = backends.of(q).varlen_fwd(
        q, k, v, target, cum_seq_q, cum_seq_k, seqused_k, None, block_table, alibi_slopes, max_q, max_k, dropout_p,
        scale, False, is_causal, *window, 0.0, return_debug_mask, None, 0, False, batch_invariant,
    )  # fmt: skip
    if target is not out:
        out.copy_(target)
    return out, lse, dmask, rng_state


OPERATORS = {
    "_scaled_dot_product_flash_attention": sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": sdpa_backward,
    "_flash_attention_forward": flash_forward,
    "_flash_attention_forward_no_dropout_inplace": flash_forward_inplace,
    "_flash_attention_backward": flash_backward,
}
