"""Attention of Hugging Face transformers by these kernels, as a function that models take by name.

    import flash_attn.integrations.transformers
    flash_attn.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="fa_native")

Beyond "flash_attention_2": sinks of gpt-oss, which transformers sends to another package under every name with "flash"
in it; V of another head dim (MLA) without padding; one wait for the GPU in a forward instead of one in each layer;
padding in inference without copies; packed rows of a batch. docs/integrations.md has the rules.

transformers_cp.py has another one, for sequences whose tokens lie on several ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict

import torch
from torch import Tensor

import flash_attn
from flash_attn import AttentionMask
from flash_attn._types import Device, Scores
from flash_attn.bert_padding import index_first_axis, pad_input
from flash_attn.integrations import mask_functions, token_layout
from flash_attn.integrations.mask_functions import MaskFunction
from flash_attn.integrations.token_layout import PaddingLayout, Tokens
from flash_attn.ops.rows import equal_steps

NAME = "fa_native"
_UNSUPPORTED = ("position_bias", "head_mask", "output_attentions")


def register(name: str = NAME) -> None:
    """Make these kernels an attention implementation of transformers, by a name for `attn_implementation`.

    Registers the attention function and its masks, for the process. Works with models that take their attention from
    `AttentionInterface` and their masks from `AttentionMaskInterface`, in transformers 5.

    Arguments:
        name: str. Without "flash": transformers looks a kernel up for such names and sends models that list the ones
            they know, gpt-oss among them, to those.

    Raises ImportError without transformers or these interfaces, ValueError for a name that means something else there.
    """
    register_functions(name, attention, padding_mask)


def register_functions(
    name: str, attention_function: Callable[..., object], mask_function: Callable[..., object]
) -> None:
    """Entries of both interfaces of transformers; raises as `register` does."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for part in ("flash", "sdpa", "flex_attention", "eager", "|", "/"):
        if part in name:
            raise ValueError(f"name: expected one without {part!r}, which means another to transformers, got {name!r}")
    AttentionInterface.register(name, attention_function)
    AttentionMaskInterface.register(name, mask_function)


class Training(TypedDict):
    """Options of training, and sinks."""

    dropout_p: float
    deterministic: bool
    sinks: Tensor | None


# ---- masks ----


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: AttentionMask | Tensor | None = None,
    use_vmap: bool = False,
    device: Device = None,
    **options: object,
) -> AttentionMask | Tensor | None:
    """Which columns of the keys hold tokens, bool (batch, columns), or None: all. An entry of `AttentionMaskInterface`.

    Causal masks and windows are the attention function's matter. A mask may have fewer columns than there are keys, as
    for a static cache: the other keys are none. Waits for the GPU where a static cache receives several tokens.

    Other masks (chunks, blocks, functions of the model's) become an AttentionMask with causal, window and padding.
    """
    if isinstance(attention_mask, AttentionMask):  # an outer model has made it
        return attention_mask
    if mask_function is not None and (use_vmap or is_other_mask(mask_function, q_length)):
        tokens = None if attention_mask is None else attention_mask.bool()
        sizes = batch_size, q_length, kv_length, q_offset, kv_offset
        return mask_functions.mask_of(mask_function, *sizes, tokens, use_vmap, device)
    columns: int | Tensor = kv_length
    if "allow_is_bidirectional_skip" not in options:  # causal: columns after the last query hold no tokens yet
        columns = q_offset + q_length - kv_offset
        if isinstance(columns, Tensor) and q_length > 1 and not token_layout.is_traced():
            columns = int(columns)
    known = isinstance(columns, (int, torch.SymInt))
    if attention_mask is not None:
        # Given to the end of a static cache, or from its first token where a sliding one keeps the last ones.
        attention_mask = attention_mask[:, : kv_offset + kv_length][:, -kv_length:].bool()
    elif known and columns >= kv_length:
        return None
    if known and q_length > 1:
        kept = min(columns, kv_length)
        if attention_mask is None:
            return torch.ones(batch_size, kept, dtype=torch.bool, device=device)  # type: ignore[arg-type]  # known: an int
        return attention_mask[:, :kept]
    # One shape for all steps of a static cache, so that compiled code and graphs run them all.
    filled = torch.arange(kv_length, device=device) < columns
    if attention_mask is None:
        return filled.expand(batch_size, -1)
    missing = kv_length - attention_mask.shape[1]
    return torch.nn.functional.pad(attention_mask, (0, missing)) & filled


def reject_other_masks(mask_function: MaskFunction | None, use_vmap: bool) -> None:
    """Raises NotImplementedError for masks that are no windows."""
    if use_vmap:
        raise NotImplementedError(
            "mask_function: expected a causal mask or a window, got one with an or_mask_function or and_mask_function"
        )
    kind = None if torch.compiler.is_compiling() else mask_functions.other_mask(mask_function)
    if kind is not None:
        raise NotImplementedError(f"mask_function: expected a causal mask or a window, got one of {kind}")


def is_other_mask(mask_function: MaskFunction, q_length: int) -> bool:
    """Whether the mask is more than causal, a window and packed sequences. Compiled code cannot look into closures:
    it assumes that an intersection is not, except for a single query, whose mask it evaluates.
    """
    if torch.compiler.is_compiling():
        name = mask_function.__code__.co_name
        return name == "or_mask" or (q_length == 1 and name == "and_mask")
    return mask_functions.other_mask(mask_function) is not None


# ---- attention ----


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: AttentionMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    block_table: Tensor | None = None,
    k_cache: Tensor | None = None,
    v_cache: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    position_bias: Tensor | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Attention as models of transformers call it, an entry of `AttentionInterface`.

    Arguments:
        module: the layer. Its is_causal holds where that argument is None.
        query: (batch, heads, seqlen_q, head_dim)
        key: (batch, heads_k, seqlen_k, head_dim)
        value: (batch, heads_k, seqlen_k, head_dim_v)
        attention_mask: None, or (batch, columns): which columns, of the cache and of the batch, hold tokens. The
            queries are the last ones. Or what the queries see, causal and windows included: an AttentionMask, a bool
            tensor (batch, 1 or heads, seqlen_q, columns), or one of numbers that are added to the scores.
        dropout: float in [0, 1). Probability of dropping a weight.
        scaling: float or None, which is 1 / sqrt(head_dim). Multiplies the scores.
        softcap: float or None. Scores become softcap * tanh(score / softcap).
        sliding_window: int. Keys that a query sees, itself included; without causal on both sides.
        s_aux: (heads,), sinks.
        position_ids: (batch or 1, seqlen_q). Packed sequences of a row, where there are no mask and no cached keys:
            one begins wherever a position is not one more than the one before.
        cu_seq_lens_q, cu_seq_lens_k: (sequences + 1,). Packed sequences, given explicitly.
        k_cache, v_cache: (num_pages, page_size, heads_k, head_dim) of query's dtype, block_table: int32 (batch,
            max_pages), cache_seqlens: int32 (batch,), keys before the new ones. A paged cache's update() sets these:
            key and value are appended, and each row of the batch attends over its pages.
        position_bias: (1 or batch, heads, seqlen_q, seqlen_k), added to the scores, as T5 has it; without packed
            sequences and pages.

    Returns (out (batch, seqlen_q, heads, head_dim_v), None).

    Raises NotImplementedError, by name, for head_mask and output_attentions.
    """
    (q, k, v), score, training = read_arguments(
        module, query, key, value, dropout, scaling, sliding_window, softcap, is_causal, s_aux, options
    )
    if isinstance(attention_mask, AttentionMask) or (attention_mask is not None and attention_mask.dim() == 4):
        score["causal"], score["window_size"] = False, (-1, -1)
        return _masked(module, q, k, v, attention_mask, position_bias, score, training), None
    if position_bias is not None:
        for name, other in (("cu_seq_lens_q", cu_seq_lens_q), ("k_cache", k_cache)):
            if other is not None:
                raise NotImplementedError(f"{name}: expected None with position_bias, got {type(other).__name__}")
        return _biased(q, k, v, attention_mask, position_bias, score, training), None
    if k_cache is not None:
        cache: tuple[object, ...] = (k_cache, v_cache, cache_seqlens, cu_seq_lens_k, block_table)
        return _over_pages(q, k, v, cache, s_aux, score), None
    if attention_mask is not None:
        return _padded(module, q, k, v, attention_mask, score, training), None
    given = {"cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k}
    missing = [name for name, lengths in given.items() if lengths is None]
    if len(missing) == 1:
        raise TypeError(f"{missing[0]}: expected a Tensor, for the other of the two is given, got None")
    if missing:
        cu_seq_lens_q = cu_seq_lens_k = _packed_by_position(module, q, k, position_ids, score["causal"])
    if cu_seq_lens_q is None or cu_seq_lens_k is None:
        return flash_attn.flash_attn_func(q, k, v, **score, **training), None
    q_rows, k_rows, v_rows = (x.flatten(0, 1) for x in (q, k, v))
    out: Tensor = flash_attn.flash_attn_varlen_func(
        q_rows, k_rows, v_rows, cu_seq_lens_q, cu_seq_lens_k, q.shape[1], k.shape[1], **score, **training
    )
    return out.unflatten(0, q.shape[:2]), None


def read_arguments(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    is_causal: bool | None,
    s_aux: Tensor | None,
    options: dict[str, Any],
) -> tuple[tuple[Tensor, Tensor, Tensor], Scores, Training]:
    """((q, k, v), score, training) for flash_attn's functions, from a model's arguments; q (batch, tokens, ...)."""
    for name in _UNSUPPORTED:
        given = options.get(name)
        if given is not None and given is not False:
            raise NotImplementedError(f"{name}: expected None, got {type(given).__name__}: it is not supported")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if q.dtype != v.dtype or k.dtype != v.dtype:  # norms and rotary embedding kept in float32
        q, k = q.to(v.dtype), k.to(v.dtype)
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0 if causal else sliding_window - 1)
    score: Scores = {"softmax_scale": scaling, "causal": causal, "window_size": window, "softcap": softcap or 0.0}
    deterministic = options.get("deterministic")
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    return (q, k, v), score, {"dropout_p": dropout, "deterministic": deterministic, "sinks": s_aux}


def _masked(
    module: torch.nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask | Tensor,
    position_bias: Tensor | None,
    score: Scores,
    training: Training,
) -> Tensor:
    """Attention by a mask of scores, of the first keys where it has fewer columns than there are keys."""
    bias = position_bias
    if not isinstance(mask, AttentionMask):
        k, v = k[:, : mask.shape[3]], v[:, : mask.shape[3]]
        bias = None if bias is None else bias[..., : mask.shape[3]]
        if mask.dtype == torch.bool:
            mask = _as_bits(mask, q.shape[1], module)
        else:
            bias, mask = mask if bias is None else mask + bias, None  # type: ignore[assignment]
            bias = bias.to(q.dtype)
    return flash_attn.flash_attn_func(q, k, v, mask=mask, attn_bias=bias, **score, **training)


def _as_bits(mask: Tensor, seqlen_q: int, module: torch.nn.Module) -> AttentionMask:
    """A bool mask of scores, packed once for all layers."""

    def pack() -> AttentionMask:
        return AttentionMask.from_tensor(mask, seqlen_q)

    if token_layout.is_traced():
        return pack()
    return token_layout.once_a_pass(mask, module, ("bits", seqlen_q), pack)


def _biased(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    position_bias: Tensor,
    score: Scores,
    training: Training,
) -> Tensor:
    """Attention with a bias of each score, where mask (batch, columns) says which of the first keys are tokens."""
    keys = None
    if mask is not None:
        _check_tokens(mask)
        k, v, position_bias = k[:, : mask.shape[1]], v[:, : mask.shape[1]], position_bias[..., : mask.shape[1]]
        keys = flash_attn.AttentionMask.key_padding(mask.bool())
    return flash_attn.flash_attn_func(q, k, v, mask=keys, attn_bias=position_bias, **score, **training)


def _packed_by_position(
    module: torch.nn.Module, q: Tensor, k: Tensor, position_ids: Tensor | None, causal: bool
) -> Tensor | None:
    batch, seqlen = q.shape[:2]
    if position_ids is None or position_ids.dim() != 2 or position_ids.shape[1] != seqlen:
        return None
    if seqlen == 1 or seqlen != k.shape[1] or not (causal or batch == 1):
        return None
    bounds: Tensor | None = token_layout.packed_sequences(position_ids, batch, seqlen, module)
    return bounds


def _padded(
    module: torch.nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    score: Scores,
    training: Training,
) -> Tensor:
    """Attention where mask (batch, columns) says which of the first keys are tokens; the queries are the last ones."""
    _check_tokens(mask)
    mask = mask.bool() if mask.dtype != torch.bool else mask
    columns, sees_by_position = mask.shape[1], score["causal"] or score["window_size"] != (-1, -1)
    k, v = k[:, :columns], v[:, :columns]
    records = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, training["sinks"]))
    if token_layout.is_traced() and not records:
        first, stop = token_layout.runs(mask)
        return _over_runs(q, k, v, first, stop, score, training)
    layout, tokens = _layout(mask, q.shape[1], module)
    if layout.full:
        return flash_attn.flash_attn_func(q, k, v, **score, **training)
    aligned = q.shape[1] == 1 or layout.ends_last or not sees_by_position
    if layout.contiguous and aligned and not records:
        return _over_runs(q, k, v, layout.first, layout.stop, score, training)
    keys, queries = tokens(sees_by_position and q.shape[1] > 1)
    return _gathered(q, k, v, keys, queries, score, training)


def _check_tokens(mask: Tensor) -> None:
    if mask.dim() != 2:
        raise NotImplementedError(
            "attention_mask: expected None or a mask of tokens (batch, columns), for masks are causal or windows here, "
            f"got {mask.dim()} dimensions"
        )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _layout(
    mask: Tensor, seqlen_q: int, module: torch.nn.Module
) -> tuple[PaddingLayout, Callable[[bool], tuple[Tokens, Tokens | None]]]:
    """(layout of the keys, a function that gives the tokens of keys and queries)."""
    layout = PaddingLayout.of(mask, module)

    def tokens(queries_too: bool) -> tuple[Tokens, Tokens | None]:
        return layout.tokens(mask, mask.shape[1]), layout.tokens(mask, seqlen_q) if queries_too else None

    return layout, tokens


def _over_runs(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor | None, stop: Tensor, score: Scores, training: Training
) -> Tensor:
    """Keys first to stop of each row, without copies and without backward; the queries are the last ones.

    Queries before `first` are padding and see no key.
    """
    sinks, dropout_p = training["sinks"], training["dropout_p"]
    if v.shape[-1] == k.shape[-1] and dropout_p == 0.0:
        return flash_attn.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=stop, cache_leftpad=first, sinks=sinks, **score
        )
    table, cu_seqlens_k = token_layout.as_pages(k.shape[0], k.shape[1], q.device)
    return _varlen_over_pages(q, k, v, table, cu_seqlens_k, stop, first, score, training)


def _varlen_over_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    cu_seqlens_k: Tensor,
    lengths: Tensor,
    first: Tensor | None,
    score: Scores,
    training: Training,
) -> Tensor:
    """Queries (batch, seqlen_q, ...) as packed ones over pages."""
    cu_seqlens_q = equal_steps(q.shape[0], q.shape[1], q.device)
    out: Tensor = flash_attn.flash_attn_varlen_func(
        q.flatten(0, 1),
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        q.shape[1],
        table.shape[1] * k.shape[1],
        block_table=table,
        seqused_k=lengths,
        leftpad_k=first,
        **score,
        **training,
    )
    return out.unflatten(0, q.shape[:2])  # type: ignore[no-any-return]  # torch has no types for it


def _gathered(
    q: Tensor, k: Tensor, v: Tensor, keys: Tokens, queries: Tokens | None, score: Scores, training: Training
) -> Tensor:
    """Attention of the tokens alone, as (indices, cu_seqlens) have them; queries None: all of them."""
    batch, seqlen_q = q.shape[:2]
    indices_k, cu_seqlens_k = keys
    rows, seqlen_k = q.flatten(0, 1), k.shape[1]
    cu_seqlens_q = equal_steps(batch, seqlen_q, q.device) if queries is None else queries[1]
    if queries is not None:
        rows = index_first_axis(rows, queries[0])
    k, v = (index_first_axis(x.flatten(0, 1), indices_k) for x in (k, v))
    out: Tensor = flash_attn.flash_attn_varlen_func(
        rows, k, v, cu_seqlens_q, cu_seqlens_k, seqlen_q, seqlen_k, **score, **training
    )
    return out.unflatten(0, (batch, seqlen_q)) if queries is None else pad_input(out, queries[0], batch, seqlen_q)


# ---- a paged cache ----


def _over_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: tuple[Any, ...],
    sinks: Tensor | None,
    score: Scores,
) -> Tensor:
    """Append k and v to their pages and attend over these: (batch, seqlen_q, heads, head_dim_v)."""
    shape, (k_cache, v_cache, lengths, cu_seqlens_k, table) = q.shape, cache
    if lengths is None:  # one token of each of many sequences, their lengths with it in cu_seqlens_k
        q, k, v = (x.flatten(0, 1).unsqueeze(1) for x in (q, k, v))
        lengths = cu_seqlens_k[: q.shape[0] + 1].diff() - 1
    out: Tensor = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=lengths, block_table=table, sinks=sinks, **score
    )
    return out.reshape(*shape[:3], v.shape[-1])
