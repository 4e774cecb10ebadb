"""Attention of Hugging Face transformers by these kernels, as a function that models take by name.

    import flash_attn.integrations.transformers
    flash_attn.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="fa_native")

Beyond "flash_attention_2": sinks of gpt-oss, which transformers sends to another package under every name with "flash"
in it; V of another head dim (MLA) without padding; one wait for the GPU in a forward instead of one in each layer;
padding in inference without copies; packed rows of a batch. docs/integrations.md says what holds.

`register_context_parallel()` makes another one, "fa_cp", of sequences whose tokens lie on several ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import flash_attn
from flash_attn.bert_padding import index_first_axis, pad_input
from flash_attn.context_parallel import CpPlan, flash_attn_cp_func
from flash_attn.integrations import token_layout
from flash_attn.integrations.token_layout import PaddingLayout
from flash_attn.ops import arguments
from flash_attn.ops.rows import equal_steps

NAME = "fa_native"
CONTEXT_PARALLEL_NAME = "fa_cp"
_UNSUPPORTED = ("position_bias", "head_mask", "output_attentions")
# What says in another way which tokens belong together, or where keys lie.
_OF_ONE_RANK = ("cu_seq_lens_q", "cu_seq_lens_k", "k_cache", "v_cache", "block_table", "cache_seqlens")
_IGNORED_LABEL = -100  # of transformers' losses
# Parts of transformers' mask functions that are no window, by the beginnings of their names.
_OTHER_MASKS = ("or_masks", "chunked_overlay", "blockwise_overlay")


def register(name: str = NAME) -> None:
    """Make these kernels an attention implementation of transformers, by a name for `attn_implementation`.

    Registers the attention function and its masks, for the process. Works with models that take their attention from
    `AttentionInterface` and their masks from `AttentionMaskInterface`, in transformers 5.

    Arguments:
        name: str. Without "flash": transformers looks a kernel up for such names and sends models that list the ones
            they know, gpt-oss among them, to those.

    Raises ImportError without transformers or these interfaces, ValueError for a name that means something else there.
    """
    _register(name, attention, padding_mask)


def register_context_parallel(name: str = CONTEXT_PARALLEL_NAME) -> None:
    """Make `flash_attn_cp_func` an attention implementation of transformers, by a name for `attn_implementation`.

    The plan of a batch is a keyword argument of the model, `cp_plan`, which hands it to its layers:

        model(input_ids=plan.shard(input_ids, 1), position_ids=plan.positions(device)[None], cp_plan=plan)

    or `model(**context_parallel_inputs(plan, input_ids, labels))`. Nothing is kept but the name.

    Arguments:
        name: str. As in `register`.

    Raises what `register` does.
    """
    _register(name, context_parallel_attention, context_parallel_mask)


def _register(name, attention_function, mask_function):
    from transformers import AttentionInterface, AttentionMaskInterface

    for part in ("flash", "sdpa", "flex_attention", "eager", "|", "/"):
        if part in name:
            raise ValueError(f"name: expected one without {part!r}, which means another to transformers, got {name!r}")
    AttentionInterface.register(name, attention_function)
    AttentionMaskInterface.register(name, mask_function)


# ---- masks ----


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: Any = None,
    **options: Any,
) -> Tensor | None:
    """Which columns of the keys hold tokens, bool (batch, columns), or None: all. An entry of `AttentionMaskInterface`.

    Causal masks and windows are the attention function's matter. A mask may have fewer columns than there are keys, as
    for a static cache: the other keys are none. Waits for the GPU where a static cache receives several tokens.

    Raises NotImplementedError for masks that are no windows (chunks, blocks, functions of the model's).
    """
    _reject_other_masks(mask_function, use_vmap)
    columns = kv_length
    if "allow_is_bidirectional_skip" not in options:  # causal: columns behind the last query hold no tokens yet
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
            return torch.ones(batch_size, kept, dtype=torch.bool, device=device)
        return attention_mask[:, :kept]
    # One shape for all steps of a static cache, so that compiled code and graphs serve them all.
    filled = torch.arange(kv_length, device=device) < columns
    if attention_mask is None:
        return filled.expand(batch_size, -1)
    missing = kv_length - attention_mask.shape[1]
    return torch.nn.functional.pad(attention_mask, (0, missing)) & filled


def _reject_other_masks(mask_function, use_vmap):
    if use_vmap:
        raise NotImplementedError(
            "mask_function: expected a causal mask or a window, got one with an or_mask_function or and_mask_function"
        )
    if torch.compiler.is_compiling():  # closures are not traced; the prompt, not compiled, went through here
        return
    for part in _parts(mask_function):
        if part.startswith(_OTHER_MASKS):
            kind = part.split(".")[0]
            raise NotImplementedError(f"mask_function: expected a causal mask or a window, got one of {kind}")


def _parts(function):
    """The qualified names of a mask function and of the functions that it is made of."""
    if isinstance(function, (tuple, list)):
        for one in function:
            yield from _parts(one)
    elif callable(function):
        yield getattr(function, "__qualname__", "")
        for cell in getattr(function, "__closure__", None) or ():
            yield from _parts(cell.cell_contents)


# ---- attention ----


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
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
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as models of transformers call it, an entry of `AttentionInterface`.

    Arguments:
        module: the layer. Its is_causal holds where that argument is None.
        query: (batch, heads, seqlen_q, head_dim)
        key: (batch, heads_k, seqlen_k, head_dim)
        value: (batch, heads_k, seqlen_k, head_dim_v)
        attention_mask: None, or (batch, columns) of which tokens are there, in a cache and in the batch: the queries
            are the last ones.
        dropout, scaling, softcap: as dropout_p, softmax_scale and softcap of `flash_attn_func`.
        sliding_window: int. Keys that a query sees, itself included; without causal on both sides.
        s_aux: (heads,), sinks.
        position_ids: (batch or 1, seqlen_q). Packed sequences of a row, where there are no mask and no cached keys:
            one begins wherever a position is not one more than the one before.
        cu_seq_lens_q, cu_seq_lens_k: (sequences + 1,). Packed sequences, given explicitly.
        k_cache, v_cache, block_table, cache_seqlens: as in `flash_attn_with_kvcache`, set by a paged cache's update():
            key and value are appended, and each row of the batch attends over its pages.

    Returns (out (batch, seqlen_q, heads, head_dim_v), None).

    Raises NotImplementedError, by name, for position_bias, head_mask, output_attentions and masks per query.
    """
    (q, k, v), score, training = _arguments(
        module, query, key, value, dropout, scaling, sliding_window, softcap, is_causal, s_aux, options
    )  # fmt: skip
    if k_cache is not None:
        return _over_pages(q, k_cache, v_cache, k, v, cache_seqlens, cu_seq_lens_k, block_table, s_aux, score), None
    if attention_mask is not None:
        return _padded(q, k, v, attention_mask, score, training), None
    if cu_seq_lens_q is None and cu_seq_lens_k is None:
        cu_seq_lens_q = cu_seq_lens_k = _packed_by_position(q, k, position_ids, score["causal"])
    if cu_seq_lens_q is None:
        return flash_attn.flash_attn_func(q, k, v, **score, **training), None
    lengths = (cu_seq_lens_q, cu_seq_lens_k, q.shape[1], k.shape[1])
    rows = (x.flatten(0, 1) for x in (q, k, v))
    return flash_attn.flash_attn_varlen_func(*rows, *lengths, **score, **training).unflatten(0, q.shape[:2]), None


def _arguments(module, query, key, value, dropout, scaling, sliding_window, softcap, is_causal, s_aux, options):
    """((q, k, v), score, training) for the functions of flash_attn, of what a model gives; q (batch, tokens, ...)."""
    for name in _UNSUPPORTED:
        given = options.get(name)
        if given is not None and given is not False:
            raise NotImplementedError(f"{name}: expected None, got {type(given).__name__}: it is not supported")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if q.dtype != v.dtype or k.dtype != v.dtype:  # norms and rotary embedding kept in float32
        q, k = q.to(v.dtype), k.to(v.dtype)
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0 if causal else sliding_window - 1)
    score = {"softmax_scale": scaling, "causal": causal, "window_size": window, "softcap": softcap or 0.0}
    deterministic = options.get("deterministic")
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    return (q, k, v), score, {"dropout_p": dropout, "deterministic": deterministic, "sinks": s_aux}


def _packed_by_position(q, k, position_ids, causal):
    batch, seqlen = q.shape[:2]
    if position_ids is None or position_ids.dim() != 2 or position_ids.shape[1] != seqlen:
        return None
    if seqlen == 1 or seqlen != k.shape[1] or not (causal or batch == 1):
        return None
    return token_layout.packed_sequences(position_ids, batch, seqlen)


def _padded(q, k, v, mask, score, training):
    """Attention where mask (batch, columns) says which of the first keys are tokens; the queries are the last ones."""
    if mask.dim() != 2:
        raise NotImplementedError(
            "attention_mask: expected None or a mask of tokens (batch, columns), for masks are causal or windows here, "
            f"got {mask.dim()} dimensions"
        )
    mask = mask.bool() if mask.dtype != torch.bool else mask
    columns, sees_by_position = mask.shape[1], score["causal"] or score["window_size"] != (-1, -1)
    k, v = k[:, :columns], v[:, :columns]
    records = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, training["sinks"]))
    if token_layout.is_traced() and not records:
        return _over_runs(q, k, v, *token_layout.runs(mask), score, training)
    layout, tokens = _layout(mask, q.shape[1])
    if layout.full:
        return flash_attn.flash_attn_func(q, k, v, **score, **training)
    aligned = q.shape[1] == 1 or layout.ends_last or not sees_by_position
    if layout.contiguous and aligned and not records:
        return _over_runs(q, k, v, layout.first, layout.stop, score, training)
    return _gathered(q, k, v, *tokens(sees_by_position and q.shape[1] > 1), score, training)


@torch.compiler.disable
def _layout(mask, seqlen_q):
    """(layout of the keys, a function that gives the tokens of keys and queries)."""
    layout = PaddingLayout.of(mask)

    def tokens(queries_too):
        keys = layout.tokens(mask)
        if not queries_too or seqlen_q == mask.shape[1]:
            return keys, keys if queries_too else None
        return keys, token_layout.tokens_of(mask[:, mask.shape[1] - seqlen_q :])

    return layout, tokens


def _over_runs(q, k, v, first, stop, score, training):
    """Keys first to stop of each row, without copies and without backward; the queries are the last ones.

    Queries before `first` are padding and see no key.
    """
    sinks, dropout_p = training["sinks"], training["dropout_p"]
    if v.shape[-1] == k.shape[-1] and dropout_p == 0.0:
        return flash_attn.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=stop, cache_leftpad=first, sinks=sinks, **score
        )  # fmt: skip
    table, cu_seqlens_k = token_layout.as_pages(*k.shape[:2], q.device)
    return _varlen_over_pages(q, k, v, table, cu_seqlens_k, stop, first, score, training)


def _varlen_over_pages(q, k, v, table, cu_seqlens_k, lengths, first, score, training):
    """Queries (batch, seqlen_q, ...) as packed ones over pages."""
    cu_seqlens_q = equal_steps(q.shape[0], q.shape[1], q.device)
    out = flash_attn.flash_attn_varlen_func(
        q.flatten(0, 1), k, v, cu_seqlens_q, cu_seqlens_k, q.shape[1], table.shape[1] * k.shape[1], block_table=table,
        seqused_k=lengths, leftpad_k=first, **score, **training,
    )  # fmt: skip
    return out.unflatten(0, q.shape[:2])


def _gathered(q, k, v, keys, queries, score, training):
    """Attention of the tokens alone, as (indices, cu_seqlens) have them; queries None: all of them."""
    batch, seqlen_q = q.shape[:2]
    indices_k, cu_seqlens_k = keys
    rows, seqlen_k = q.flatten(0, 1), k.shape[1]
    cu_seqlens_q = equal_steps(batch, seqlen_q, q.device) if queries is None else queries[1]
    if queries is not None:
        rows = index_first_axis(rows, queries[0])
    k, v = (index_first_axis(x.flatten(0, 1), indices_k) for x in (k, v))
    out = flash_attn.flash_attn_varlen_func(
        rows, k, v, cu_seqlens_q, cu_seqlens_k, seqlen_q, seqlen_k, **score, **training
    )  # fmt: skip
    return out.unflatten(0, (batch, seqlen_q)) if queries is None else pad_input(out, queries[0], batch, seqlen_q)


# ---- a paged cache ----


def _over_pages(q, k_cache, v_cache, k, v, lengths, cu_seqlens_k, table, sinks, score):
    """Append k and v to their pages and attend over these: (batch, seqlen_q, heads, head_dim_v)."""
    shape = q.shape
    if lengths is None:  # one token of each of many sequences, their lengths with it in cu_seqlens_k
        q, k, v = (x.flatten(0, 1).unsqueeze(1) for x in (q, k, v))
        lengths = cu_seqlens_k[: q.shape[0] + 1].diff() - 1
    out = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=lengths, block_table=table, sinks=sinks, **score
    )  # fmt: skip
    return out.reshape(*shape[:3], v.shape[-1])


# ---- context parallelism ----


def context_parallel_inputs(plan: CpPlan, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
    """This rank's keyword arguments for a causal model under `register_context_parallel`.

    Arguments:
        plan: CpPlan of the batch.
        input_ids: integers (batch, tokens) of all ranks; batch 1 with a packed plan.
        labels: int64 like input_ids, -100 where ignored, or None. As transformers has them, before the shift by one,
            which is made here: a token's label may lie on another rank. A document's last token gets none.

    Returns input_ids, position_ids, cp_plan and use_cache=False; with labels also labels and shift_labels, both
    shifted, and num_items_in_batch, the count of all ranks: their losses' sum is the loss of the whole.

    Raises RuntimeError or TypeError naming the argument that does not fit.
    """
    if not isinstance(plan, CpPlan):
        raise TypeError(f"plan: expected a CpPlan, got {arguments.shown(plan)}")
    positions = plan.positions(input_ids.device)[None]
    positions._flash_attn_cp_plan = plan  # equal by construction: nothing to compare, which waits for the GPU
    inputs = {"input_ids": plan.shard(input_ids, 1), "position_ids": positions, "cp_plan": plan, "use_cache": False}
    if labels is not None:
        if labels.shape != input_ids.shape:
            raise RuntimeError(f"labels: expected shape {list(input_ids.shape)}, got {list(labels.shape)}")
        shifted = labels.roll(-1, 1)
        for start, stop in zip(plan.cu_seqlens, plan.cu_seqlens[1:]):
            if stop > start:
                shifted[:, stop - 1] = _IGNORED_LABEL
        inputs["labels"] = inputs["shift_labels"] = plan.shard(shifted, 1)
        inputs["num_items_in_batch"] = (shifted != _IGNORED_LABEL).sum()
    return inputs


def context_parallel_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    **options: Any,
) -> None:
    """None, for the plan says which tokens there are. An entry of `AttentionMaskInterface`.

    Raises NotImplementedError for padding (a mask of ones passes, and waits for the GPU), cached keys, and masks that
    are no windows; on this rank alone, for the plan is not known here.
    """
    _reject_other_masks(mask_function, use_vmap)
    if attention_mask is not None and (attention_mask.shape[-1] != q_length or not attention_mask.all()):
        raise NotImplementedError(
            "attention_mask: expected None with context parallelism, got one that is not all ones for this rank's "
            f"{q_length} tokens (shape {list(attention_mask.shape)}): CpPlan.varlen takes documents without padding"
        )
    is_first = isinstance(q_offset, int) and q_offset == 0
    if not is_first or kv_length != q_length:
        raise NotImplementedError(_no_cache(kv_length, q_length))


def _no_cache(keys, tokens):
    return (
        f"past_key_values: expected None or an empty one that grows, with context parallelism, got {keys} keys for "
        f"{tokens} tokens"
    )


def context_parallel_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    cp_plan: CpPlan | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention over the tokens of all ranks of a plan, an entry of `AttentionInterface`; every rank calls it.

    Arguments:
        query: (batch, heads, num_tokens, head_dim): this rank's tokens, as `cp_plan.shard` gives them. Batch 1 with a
            packed plan.
        key: (batch, heads_k, num_tokens, head_dim)
        value: (batch, heads_k, num_tokens, head_dim_v)
        attention_mask: None.
        position_ids: (batch or 1, num_tokens), which have to be the plan's positions where a model hands them to its
            layers. Compared once a forward, which waits for the GPU, unless they come from `context_parallel_inputs`.
        cp_plan: CpPlan of the batch, a keyword argument of the model.
        The others as in `attention`.

    Returns (out (batch, num_tokens, heads, head_dim_v), None).

    Raises TypeError without a plan; NotImplementedError, by name, for masks, cached keys, documents given otherwise
    than by the plan and what `attention` does not support; RuntimeError for positions and shapes that are not the
    plan's. As far as the plan checks calls, on every rank if on one, but for a missing plan.
    """
    if not isinstance(cp_plan, CpPlan):
        raise TypeError(
            "cp_plan: expected a CpPlan among the keyword arguments of the model, which it hands to its layers, got "
            f"{arguments.shown(cp_plan)}"
        )
    try:
        (q, k, v), score, training = _arguments(
            module, query, key, value, dropout, scaling, sliding_window, softcap, is_causal, s_aux, options
        )  # fmt: skip
        _check_tokens_of_plan(cp_plan, q, k, attention_mask, position_ids, options)
    except Exception as raised:  # of any kind: the other ranks wait to be told
        cp_plan.compare("context_parallel_attention", "", raised, None)
        raise  # never reached: what compare is given, it raises
    if cp_plan.is_packed:
        q, k, v = (x.squeeze(0) for x in (q, k, v))
    out = flash_attn_cp_func(q, k, v, plan=cp_plan, **score, **training)
    return out.unsqueeze(0) if cp_plan.is_packed else out, None


@torch.compiler.disable
def _check_tokens_of_plan(plan, q, k, attention_mask, position_ids, options):
    for name in _OF_ONE_RANK:
        if options.get(name) is not None:
            raise NotImplementedError(f"{name}: expected None with context parallelism, got a value: the plan says it")
    if attention_mask is not None:
        raise NotImplementedError(
            f"attention_mask: expected None with context parallelism, got shape {list(attention_mask.shape)}"
        )
    if k.shape[1] != q.shape[1]:
        raise NotImplementedError(_no_cache(k.shape[1], q.shape[1]))
    if plan.is_packed and q.shape[0] != 1:
        raise RuntimeError(f"query: expected a batch of 1 with a packed plan, got {q.shape[0]}")
    if q.shape[1] != plan.num_tokens:
        raise RuntimeError(f"query: expected the {plan.num_tokens} tokens of rank {plan.rank}, got {q.shape[1]}")
    if position_ids is None or getattr(position_ids, "_flash_attn_cp_plan", None) is plan:
        return
    if position_ids.shape[-1:] != (plan.num_tokens,) or not (position_ids == plan.positions(position_ids.device)).all():
        raise RuntimeError(
            "position_ids: expected plan.positions() of this rank in each row, got others; documents that are packed "
            "in a row are a plan's, CpPlan.varlen"
        )
    position_ids._flash_attn_cp_plan = plan
