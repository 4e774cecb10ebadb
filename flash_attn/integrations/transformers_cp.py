"""Attention of Hugging Face transformers over sequences whose tokens lie on several ranks (docs/context_parallel.md).

from flash_attn.integrations.transformers_cp import context_parallel_inputs, register_context_parallel
register_context_parallel()
model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="fa_cp")
loss = model(**context_parallel_inputs(plan, input_ids, labels)).loss
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn.context_parallel import CpPlan, flash_attn_cp_func
from flash_attn.context_parallel.exchange.consistency import raise_on_ranks_of_last_plan
from flash_attn.integrations import token_layout
from flash_attn.integrations.mask_functions import MaskFunction
from flash_attn.integrations.transformers import read_arguments, register_functions, reject_other_masks
from flash_attn.ops import arguments

NAME = "fa_cp"
# What says in another way which tokens belong together, or where keys lie.
_OF_ONE_RANK = ("cu_seq_lens_q", "cu_seq_lens_k", "k_cache", "v_cache", "block_table", "cache_seqlens")
_IGNORED_LABEL = -100  # of transformers' losses


def register_context_parallel(name: str = NAME) -> None:
    """Make `flash_attn_cp_func` an attention implementation of transformers, by a name for `attn_implementation`.

    The plan of a batch is a keyword argument of the model, `cp_plan`, which hands it to its layers:

        model(input_ids=plan.shard(input_ids, 1), position_ids=plan.positions(device)[None], cp_plan=plan)

    or `model(**context_parallel_inputs(plan, input_ids, labels))`. Nothing is kept but the name.

    Arguments:
        name: str. Without "flash": transformers looks a kernel up for such names.

    Raises ImportError without transformers or its interfaces, ValueError for a name that means something else there.
    """
    register_functions(name, context_parallel_attention, context_parallel_mask)


def context_parallel_inputs(plan: CpPlan, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, object]:
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
    token_layout.keep(positions, id(plan), plan)  # equal by construction: nothing to compare, which waits for the GPU
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
    mask_function: MaskFunction | None = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    **options: object,
) -> None:
    """None, for the plan says which tokens there are. An entry of `AttentionMaskInterface`.

    Raises NotImplementedError for padding (a mask of ones passes, and waits for the GPU), cached keys, and masks that
    are no windows; on every rank if on one, where calls of this thread's last plan are compared.
    """
    try:
        _check_mask(q_length, kv_length, q_offset, mask_function, attention_mask, use_vmap)
    except Exception as raised:  # of any kind: the other ranks wait to be told
        raise_on_ranks_of_last_plan("context_parallel_mask", raised)


def _check_mask(
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    mask_function: MaskFunction | None,
    attention_mask: Tensor | None,
    use_vmap: bool,
) -> None:
    reject_other_masks(mask_function, use_vmap)
    if attention_mask is not None and (attention_mask.shape[-1] != q_length or not attention_mask.all()):
        raise NotImplementedError(
            "attention_mask: expected None with context parallelism, got one that is not all ones for this rank's "
            f"{q_length} tokens (shape {list(attention_mask.shape)}): CpPlan.varlen takes documents without padding"
        )
    is_first = isinstance(q_offset, int) and q_offset == 0
    if not is_first or kv_length != q_length:
        raise NotImplementedError(_no_cache(kv_length, q_length))


def _no_cache(keys: int, tokens: int) -> str:
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
    **options: object,
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
        dropout: float in [0, 1). Probability of dropping a weight.
        scaling: float or None, which is 1 / sqrt(head_dim). Multiplies the scores.
        sliding_window: int. Keys that a query sees, itself included; without causal on both sides.
        softcap: float or None. Scores become softcap * tanh(score / softcap).
        is_causal: bool, the layer's own if None.
        s_aux: (heads,), sinks.

    Returns (out (batch, num_tokens, heads, head_dim_v), None).

    Raises TypeError without a plan; NotImplementedError, by name, for masks, cached keys, documents given otherwise
    than by the plan and what `attention` does not support; RuntimeError for positions and shapes that are not the
    plan's. As far as the plan checks calls, on every rank if on one; without a plan as far as this thread's last one
    does.
    """
    if not isinstance(cp_plan, CpPlan):
        error = TypeError(
            "cp_plan: expected a CpPlan among the keyword arguments of the model, which it hands to its layers, got "
            f"{arguments.shown(cp_plan)}"
        )
        raise_on_ranks_of_last_plan("context_parallel_attention", error)
    try:
        (q, k, v), score, training = read_arguments(
            module, query, key, value, dropout, scaling, sliding_window, softcap, is_causal, s_aux, options
        )
        _check_tokens_of_plan(module, cp_plan, q, k, attention_mask, position_ids, options)
    except Exception as raised:  # of any kind: the other ranks wait to be told
        cp_plan.compare("context_parallel_attention", "", raised)
        raise  # never reached: compare raises the error that it is given
    if cp_plan.is_packed:
        q, k, v = (x.squeeze(0) for x in (q, k, v))
    out = flash_attn_cp_func(q, k, v, plan=cp_plan, **score, **training)
    return out.unsqueeze(0) if cp_plan.is_packed else out, None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _check_tokens_of_plan(
    module: torch.nn.Module,
    plan: CpPlan,
    q: Tensor,
    k: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    options: dict[str, object],
) -> None:
    for name in _OF_ONE_RANK:
        if options.get(name) is not None:
            raise NotImplementedError(f"{name}: expected None with context parallelism, got a value: the plan has it")
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
    if position_ids is not None:
        token_layout.once_a_pass(position_ids, module, id(plan), lambda: _checked_positions(position_ids, plan))


def _checked_positions(position_ids: Tensor, plan: CpPlan) -> CpPlan:
    """plan, if the positions are its own."""
    if position_ids.shape[-1:] != (plan.num_tokens,) or not (position_ids == plan.positions(position_ids.device)).all():
        raise RuntimeError(
            "position_ids: expected plan.positions() of this rank in each row, got others (CpPlan.varlen makes a "
            "plan of documents packed in a row)"
        )
    return plan
