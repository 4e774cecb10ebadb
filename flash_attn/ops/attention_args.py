"""The arguments of the operators as typed records, from which all that depends on their order derives.

Each record names the parameters of an operator in the order of its schema and is a tuple of them, so that an operator
takes one as it is: op(*args). The schema, what the forward saves for the backward and the positions of the gradients
follow from the fields; nothing else counts positions.
Annotations stay objects (no postponed evaluation): the schemas are made of them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import torch
from torch import Tensor

from flash_attn.eight_bit import EIGHT_BIT, Descales
from flash_attn.ops.quant_args import NO_QUANT, QuantArgs


class Sequences(NamedTuple):
    """How rows belong to sequences: the arguments of varlen attention that dense attention does not have."""

    cu_seqlens_q: Optional[Tensor]
    cu_seqlens_k: Optional[Tensor]
    max_seqlen_q: Union[int, Tensor]
    max_seqlen_k: Union[int, Tensor]
    seqused_k: Optional[Tensor] = None
    leftpad_k: Optional[Tensor] = None
    block_table: Optional[Tensor] = None


DENSE = Sequences(None, None, 0, 0)


class Options(NamedTuple):
    """What FlashAttention-2's functions have no argument for, as the caller gave it; sinks alone travel as a tensor."""

    sinks_name: str = "sinks"  # the caller's
    return_max_logit: bool = False
    batch_invariant: bool = False
    quant: QuantArgs = NO_QUANT
    sm_margin: int = 0
    out: Optional[Tensor] = None  # receives the result
    seqused_k: Optional[Tensor] = None
    leftpad_k: Optional[Tensor] = None
    qv: Optional[Tensor] = None
    qv_name: str = "qv"  # the caller's


PLAIN = Options()


class AttentionArgs(NamedTuple):
    """Of the forward, `flash_attn_core::fwd`. Dense and varlen attention both take it: cu_seqlens_q None means dense.

    So do packed inputs: (qkv, None, None) with qkv (..., 3, nheads, head_dim), or (q, kv, None) with kv
    (..., 2, nheads_k, head_dim).
    """

    q: Tensor
    k: Optional[Tensor]
    v: Optional[Tensor]
    cu_seqlens_q: Optional[Tensor]
    cu_seqlens_k: Optional[Tensor]
    seqused_k: Optional[Tensor]
    leftpad_k: Optional[Tensor]
    block_table: Optional[Tensor]
    alibi_slopes: Optional[Tensor]
    sinks: Optional[Tensor]
    max_seqlen_q: int
    max_seqlen_k: int
    dropout_p: float
    softmax_scale: float
    causal: bool
    window_left: int
    window_right: int
    softcap: float
    deterministic: bool
    return_softmax: bool
    return_max_logit: bool
    batch_invariant: bool = False
    q_descale: Optional[Tensor] = None
    k_descale: Optional[Tensor] = None
    v_descale: Optional[Tensor] = None
    v_per_channel: bool = False
    out_dtype: Optional[torch.dtype] = None
    fast_exp: bool = False
    sm_margin: int = 0
    qv: Optional[Tensor] = None

    def named(self) -> dict[str, Any]:
        """The values of NAMED_OPTIONS and sm_margin that are given, by name: reading one costs the extension as much as
        a check."""
        given: dict[str, Any] = {}
        if self.sinks is None and not self.sm_margin:
            return given
        for name in NAMED_OPTIONS:
            value = getattr(self, name)
            if value is not None:
                given[name] = value
        if self.sm_margin:
            given["sm_margin"] = self.sm_margin
        return given

    def differentiable(self) -> tuple[Optional[Tensor], ...]:
        """The values of ATTENTION_INPUTS."""
        return self.q, self.k, self.v, self.sinks

    def forward_only(self) -> Optional[str]:
        """The first argument given that has no backward, by name; k where it has 8 bits."""
        if self.seqused_k is None and self.leftpad_k is None and self.block_table is None and self.qv is None:
            return "k" if self.k is not None and self.k.dtype in EIGHT_BIT else None
        return next(name for name in FORWARD_ONLY if getattr(self, name) is not None)

    def is_scaled(self) -> bool:
        """Whether a tensor has 8 bits or an argument of such calls is given."""
        return (
            self.q_descale is not None
            or self.k_descale is not None
            or self.v_descale is not None
            or self.out_dtype is not None
            or self.q.dtype in EIGHT_BIT
            or (self.k is not None and self.k.dtype in EIGHT_BIT)
            or (self.v is not None and self.v.dtype in EIGHT_BIT)
        )

    def descales(self) -> Descales:
        return Descales(self.q_descale, self.k_descale, self.v_descale, self.v_per_channel)

    def scaling(self) -> dict[str, Any]:
        """What calls with 8-bit tensors have beside the others, as the backends take it by name."""
        return {name: getattr(self, name) for name in SCALING}

    def without_scaling(self, q: Tensor, k: Optional[Tensor], v: Optional[Tensor]) -> "AttentionArgs":
        """The same call of operands that descales have been applied to."""
        return self._replace(
            q=q, k=k, v=v, q_descale=None, k_descale=None, v_descale=None, v_per_channel=False, out_dtype=None,
            fast_exp=False,
        )  # fmt: skip


# Options of scores that FlashAttention-2 does not have: both records have them, and the backends take them by name.
NAMED_OPTIONS = ("sinks",)
# What calls with 8-bit tensors have beside the others, also taken by name.
SCALING = ("q_descale", "k_descale", "v_descale", "v_per_channel", "out_dtype")
ATTENTION_INPUTS = ("q", "k", "v", "sinks")  # the fields that have gradients
FORWARD_ONLY = ("seqused_k", "leftpad_k", "block_table", "qv")


class AttentionBackwardArgs(NamedTuple):
    """Of the backward, `flash_attn_core::bwd`: gradients of the results, what the forward saved, its options."""

    dout: Tensor
    dlse: Optional[Tensor]
    q: Tensor
    k: Optional[Tensor]
    v: Optional[Tensor]
    out: Tensor
    lse: Tensor
    rng_state: Tensor
    cu_seqlens_q: Optional[Tensor]
    cu_seqlens_k: Optional[Tensor]
    alibi_slopes: Optional[Tensor]
    sinks: Optional[Tensor]
    max_seqlen_q: int
    max_seqlen_k: int
    dropout_p: float
    softmax_scale: float
    causal: bool
    window_left: int
    window_right: int
    softcap: float
    deterministic: bool
    batch_invariant: bool = False
    sm_margin: int = 0

    named = AttentionArgs.named  # type: ignore[misc]  # mypy knows no such statement in a NamedTuple

    def differentiable(self) -> tuple[Optional[Tensor], ...]:
        """The values of BACKWARD_INPUTS."""
        return self.dout, self.dlse, self.q, self.k, self.v


BACKWARD_INPUTS = ("dout", "dlse", "q", "k", "v")  # the fields that may ask for a gradient; none gets one


def saved_for_backward(
    args: AttentionArgs, out: Tensor, lse: Tensor, rng_state: Tensor
) -> tuple[tuple[Optional[Tensor], ...], tuple[Any, ...]]:
    """(tensors, options) that a forward saves: with dout and dlse before them they make AttentionBackwardArgs."""
    tensors = (
        args.q, args.k, args.v, out, lse, rng_state, args.cu_seqlens_q, args.cu_seqlens_k, args.alibi_slopes,
        args.sinks,
    )  # fmt: skip
    options = (
        args.max_seqlen_q, args.max_seqlen_k, args.dropout_p, args.softmax_scale, args.causal, args.window_left,
        args.window_right, args.softcap, args.deterministic, args.batch_invariant, args.sm_margin,
    )  # fmt: skip
    return tensors, options


class KvCacheArgs(NamedTuple):
    """Of attention over a KV cache, `flash_attn_core::kvcache_fwd`, and with new keys `::kvcache_append_fwd`."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Optional[Tensor]
    v: Optional[Tensor]
    rotary_cos: Optional[Tensor]
    rotary_sin: Optional[Tensor]
    cache_seqlens: Optional[Tensor]
    cache_batch_idx: Optional[Tensor]
    cache_leftpad: Optional[Tensor]
    block_table: Optional[Tensor]
    alibi_slopes: Optional[Tensor]
    out: Optional[Tensor]
    plan: Optional[Tensor]
    k_token_descale: Optional[Tensor]  # in place of k_descale: of each row, written with new ones; what an operator
    v_token_descale: Optional[Tensor]  # writes has no default, for torch.library counts on its position
    softmax_scale: float
    causal: bool
    window_left: int
    window_right: int
    softcap: float
    rotary_interleaved: bool
    num_splits: int
    batch_invariant: bool
    sinks: Optional[Tensor] = None
    q_descale: Optional[Tensor] = None
    k_descale: Optional[Tensor] = None
    v_descale: Optional[Tensor] = None
    v_per_channel: bool = False
    out_dtype: Optional[torch.dtype] = None
    sm_margin: int = 0
    qv: Optional[Tensor] = None

    def named(self) -> dict[str, Any]:
        """Those of NAMED_OPTIONS that it has, and sm_margin, that are given, by name."""
        given: dict[str, Any] = {} if self.sinks is None else {"sinks": self.sinks}
        if self.sm_margin:
            given["sm_margin"] = self.sm_margin
        return given

    def is_scaled(self) -> bool:
        """Whether a tensor has 8 bits or an argument of such calls is given."""
        return (
            self.k_descale is not None
            or self.v_descale is not None
            or self.k_token_descale is not None
            or self.v_token_descale is not None
            or self.q_descale is not None
            or self.out_dtype is not None
            or self.k_cache.dtype in EIGHT_BIT
            or self.v_cache.dtype in EIGHT_BIT
            or self.q.dtype in EIGHT_BIT
        )

    def scaling(self) -> dict[str, Any]:
        """What calls with 8-bit tensors have beside the others, as the backends take it by name."""
        return {name: getattr(self, name) for name in (*SCALING, "k_token_descale", "v_token_descale")}

    def differentiable(self) -> tuple[Optional[Tensor], ...]:
        """The values of KVCACHE_INPUTS."""
        return self.q, self.k_cache, self.v_cache, self.k, self.v, self.sinks, self.out, self.qv


# The fields that may ask for a gradient; none gets one.
KVCACHE_INPUTS = ("q", "k_cache", "v_cache", "k", "v", "sinks", "out", "qv")


class KvCachePlanArgs(NamedTuple):
    """Of the schedule of calls over a KV cache, `flash_attn_core::kvcache_plan`, which fills plan."""

    cache_seqlens: Tensor
    cache_leftpad: Optional[Tensor]
    plan: Tensor
    batch: int
    seqlen_q: int
    seqlen_new: int
    heads: int
    heads_k: int
    head_dim: int
    seqlen_cache: int
    causal: bool
    window_left: int
    window_right: int
    num_splits: int
    batch_invariant: bool
    eight_bit: bool = False  # of a cache of codes
    sm_margin: int = 0
    head_dim_v: int = 0  # of the calls' qv; 0: they have none

    def sizes(self) -> tuple[Any, ...]:
        """What all backends schedule by, but for the tensors."""
        return self[self._fields.index("batch") : self._fields.index("eight_bit")]


_SCHEMA_TYPES = {
    Tensor: "Tensor",
    Optional[Tensor]: "Tensor?",
    Optional[torch.dtype]: "ScalarType?",
    int: "SymInt",
    float: "float",
    bool: "bool",
}


def schema(record: type[Any], returns: str, written: Optional[Mapping[str, str]] = None) -> str:
    """The schema "(type name, ...) -> returns" of an operator over the fields of a record.

    written: the fields that it writes, each with the letter of its alias set.
    """
    written = written or {}
    return f"({', '.join(_parameter(record, name, written) for name in record._fields)}) -> {returns}"


def _parameter(record: type[Any], name: str, written: Mapping[str, str]) -> str:
    kind = _SCHEMA_TYPES[record.__annotations__[name]]
    if name in written:
        kind = kind.replace("Tensor", f"Tensor({written[name]}!)")
    default = f"={record._field_defaults[name]}" if name in record._field_defaults else ""
    return f"{kind} {name}{default}"


def attention_gradients(values: Sequence[Any], record: type[Any] = AttentionArgs) -> tuple[Any, ...]:
    """A gradient for every field of a record: values, one for each of ATTENTION_INPUTS, and None elsewhere."""
    given = dict(zip(ATTENTION_INPUTS, values))
    return tuple(given.get(name) for name in record._fields)
