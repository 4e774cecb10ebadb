"""The arguments of the operators as typed records, the only place that knows their order.

Each record names the parameters of an operator in the order of its schema and is a tuple of them, so that an operator
takes one as it is: op(*args). The schema, the tensors saved for the backward and the positions of the gradients follow
from the fields; nothing else counts positions.
Annotations stay objects (no postponed evaluation): the schemas are made of them.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, is_
from typing import NamedTuple, Optional, TypeVar, Union

import torch
from torch import Tensor

from flash_attn.eight_bit import EIGHT_BIT, Descales
from flash_attn.masks import AttentionMask
from flash_attn.masks.arguments import with_all_axes
from flash_attn.masks.factors import MaskFactors
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
    """Options that FlashAttention-2 does not have, as the caller gave them; sinks are passed separately."""

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
    mask: Union[AttentionMask, Tensor, None] = None
    attn_bias: Optional[Tensor] = None
    rel_bias: Optional[Tensor] = None

    def biases(self) -> tuple[Optional[Tensor], ...]:
        """The values of BIASES."""
        return self.attn_bias, self.rel_bias


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
    mask_query_ranges: Optional[Tensor] = None
    mask_key_hidden: Optional[Tensor] = None
    mask_bits: Optional[Tensor] = None
    mask_block_map: Optional[Tensor] = None
    mask_block_q: int = 0
    mask_block_k: int = 0
    attn_bias: Optional[Tensor] = None
    rel_bias: Optional[Tensor] = None
    qv: Optional[Tensor] = None

    def named(self) -> dict[str, object]:
        """The options that are given, by name: NAMED_OPTIONS, attn_bias, mask, sm_margin, and of a backward bias_grad
        if it is False. Others are left out, because the extension takes as long to read one as to check one."""
        given: dict[str, object] = {}
        optional, defaults = _OPTIONAL[type(self)]
        # tensors would be compared by ==, which takes longer than the rest of the call
        if self.sinks is None and not self.has_score_tensors() and self[optional] == defaults:
            return given
        for name in NAMED_OPTIONS:
            value = getattr(self, name)
            if _is_given(value, self._field_defaults.get(name)):
                given[name] = value
        if self.attn_bias is not None:
            given["attn_bias"] = with_all_axes(self.attn_bias, packed=self.cu_seqlens_q is not None)
        if not getattr(self, "bias_grad", True) and any(x is not None for x in self.biases()):
            given["bias_grad"] = False
        mask = self.mask()
        if mask is not None:
            given["mask"] = mask
        if self.sm_margin:
            given["sm_margin"] = self.sm_margin
        return given

    def has_score_tensors(self) -> bool:
        """Whether the call has a mask, a bias or another of the options in SCORES."""
        if not _is_compiling() and all(map(is_, _values_of_scores(self), _NO_SCORES)):  # compilers know neither
            return False
        return any(_is_given(getattr(self, name), default) for name, default in zip(SCORES, _NO_SCORES))

    def mask(self) -> Optional[MaskFactors]:
        ranges, hidden, bits, blocks = self.mask_query_ranges, self.mask_key_hidden, self.mask_bits, self.mask_block_map
        if ranges is hidden is bits is blocks is None:
            return None
        return MaskFactors(ranges, hidden, bits, blocks, (self.mask_block_q, self.mask_block_k))

    def further_results(self) -> dict[str, bool]:
        """Results besides those of FlashAttention-2, and whether they are wanted: not all kernels have them."""
        return {"max_logit": self.return_max_logit}

    def differentiable(self) -> tuple[Optional[Tensor], ...]:
        """The values of ATTENTION_INPUTS."""
        return self.q, self.k, self.v, self.sinks, *self.biases()

    def biases(self) -> tuple[Optional[Tensor], ...]:
        """The values of BIASES."""
        return self.attn_bias, self.rel_bias

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

    def scaling(self) -> dict[str, object]:
        """The arguments of calls with 8-bit tensors alone, which the backends take by name."""
        return {name: getattr(self, name) for name in SCALING}

    def without_scaling(self, q: Tensor, k: Optional[Tensor], v: Optional[Tensor]) -> "AttentionArgs":
        """The same call with operands to which the descales have been applied."""
        defaults = {name: self._field_defaults[name] for name in (*SCALING, "fast_exp")}
        return self._replace(q=q, k=k, v=v, **defaults)


# The tensors of a mask, which the backends take as one MaskFactors by the name of mask.
MASK_TENSORS = ("mask_query_ranges", "mask_key_hidden", "mask_bits", "mask_block_map")
# The arguments of calls with 8-bit tensors alone, also taken by name.
SCALING = ("q_descale", "k_descale", "v_descale", "v_per_channel", "out_dtype")
BIASES = ("attn_bias", "rel_bias")  # learned tensors of scores
ATTENTION_INPUTS = ("q", "k", "v", "sinks", *BIASES)  # the fields that have gradients
FORWARD_ONLY = ("seqused_k", "leftpad_k", "block_table", "qv")


class AttentionBackwardArgs(NamedTuple):
    """Of the backward, `flash_attn_core::bwd`: gradients of the results, tensors saved by the forward, its options."""

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
    mask_query_ranges: Optional[Tensor] = None
    mask_key_hidden: Optional[Tensor] = None
    mask_bits: Optional[Tensor] = None
    mask_block_map: Optional[Tensor] = None
    mask_block_q: int = 0
    mask_block_k: int = 0
    attn_bias: Optional[Tensor] = None
    rel_bias: Optional[Tensor] = None
    bias_grad: bool = True  # whether the biases get gradients, which cost time

    # mypy knows no assignment in a NamedTuple
    has_score_tensors = AttentionArgs.has_score_tensors  # type: ignore[misc]
    biases = AttentionArgs.biases  # type: ignore[misc]
    mask = AttentionArgs.mask  # type: ignore[misc]
    named = AttentionArgs.named  # type: ignore[misc]

    def learned(self) -> tuple[Optional[Tensor], ...]:
        """The inputs that get a gradient, in the order of ATTENTION_INPUTS."""
        inputs = self.q, self.k, self.v, self.sinks
        return (*inputs, *(self.biases() if self.bias_grad else (None,) * len(BIASES)))

    def differentiable(self) -> tuple[Optional[Tensor], ...]:
        """The values of BACKWARD_INPUTS."""
        return self.dout, self.dlse, self.q, self.k, self.v, self.sinks, *self.biases()

    def forward_args(self) -> AttentionArgs:
        """Those of the forward, which returned out and lse."""
        given = {name: getattr(self, name) for name in AttentionArgs._fields if name in self._fields}
        return AttentionArgs(
            **given, seqused_k=None, leftpad_k=None, block_table=None, return_softmax=False, return_max_logit=False
        )


# Of each record the fields from sm_margin on and their defaults: `named` passes on what differs from these.
_OPTIONAL: dict[type, tuple[slice, tuple[object, ...]]] = {
    record: (
        slice(record._fields.index("sm_margin"), None),
        tuple(map(record._field_defaults.get, record._fields[record._fields.index("sm_margin") :])),
    )
    for record in (AttentionArgs, AttentionBackwardArgs)
}
# The options of scores that FlashAttention-2 does not have: the fields of both records from here on. A forward saves
# them for its backward.
SCORES = tuple(
    name
    for name in AttentionBackwardArgs._fields[AttentionBackwardArgs._fields.index("sm_margin") + 1 :]
    if name in AttentionArgs._fields
)
SCORE_TENSORS = tuple(name for name in SCORES if AttentionArgs.__annotations__[name] == Optional[Tensor])
SCORE_NUMBERS = tuple(name for name in SCORES if name not in SCORE_TENSORS)
# Those that the backends take by their own names, and sinks.
NAMED_OPTIONS = ("sinks", *(name for name in SCORES if not name.startswith("mask_") and name != "attn_bias"))
_NO_SCORES = tuple(map(AttentionArgs._field_defaults.get, SCORES))
_values_of_scores = attrgetter(*SCORES)
# The fields that a second backward may be asked for; out and lse are results of the others.
BACKWARD_INPUTS = ("dout", "dlse", *ATTENTION_INPUTS)
TANGENT_INPUTS = ATTENTION_INPUTS[:4]  # those with tangents and second derivatives


class Tangents(NamedTuple):
    """Directions of TANGENT_INPUTS, like them and in their packing; None is zero."""

    tq: Optional[Tensor]
    tk: Optional[Tensor]
    tv: Optional[Tensor]
    tsinks: Optional[Tensor]


def _is_given(value: object, default: object) -> bool:
    """Whether an option differs from its default; tensors are not compared."""
    return value is not default and (isinstance(value, Tensor) or value != default)


_is_compiling = torch.compiler.is_compiling
_Record = TypeVar("_Record", bound=NamedTuple)


def defaults_after(record: type[NamedTuple], name: str) -> tuple[object, ...]:
    """The defaults of the fields of a record that follow the field `name`."""
    fields = record._fields[record._fields.index(name) + 1 :]
    return tuple(record._field_defaults[field] for field in fields)


def filled(record: type[_Record], given: tuple[object, ...], defaults: tuple[object, ...]) -> _Record:
    """record(*given), whose other fields have these defaults; 0.3 us faster, except in compiled code."""
    make: Callable[..., _Record] = record
    return make(*given) if _is_compiling() else tuple.__new__(record, given + defaults)


def made(record: type[_Record], values: Sequence[object]) -> _Record:
    """record(*values), of values that come without types, as those of an operator do."""
    make: Callable[..., _Record] = record
    return make(*values)


def replaced(record: _Record, **fields: object) -> _Record:
    """record._replace(**fields), which torch 2.6 does not compile."""
    make: Callable[..., _Record] = type(record)
    return make(**{**dict(zip(type(record)._fields, record)), **fields})


def saved_for_backward(
    args: AttentionArgs, out: Tensor, lse: Tensor, rng_state: Tensor
) -> tuple[tuple[Optional[Tensor], ...], tuple[float, ...]]:
    """(tensors, options) that a forward saves, of which `backward_args` makes AttentionBackwardArgs."""
    tensors = (
        args.q,
        args.k,
        args.v,
        out,
        lse,
        rng_state,
        args.cu_seqlens_q,
        args.cu_seqlens_k,
        args.alibi_slopes,
        args.sinks,
    )
    options = (
        args.max_seqlen_q,
        args.max_seqlen_k,
        args.dropout_p,
        args.softmax_scale,
        args.causal,
        args.window_left,
        args.window_right,
        args.softcap,
        args.deterministic,
        args.batch_invariant,
        args.sm_margin,
    )
    if not args.has_score_tensors():
        return tensors, options
    return (
        (*tensors, *(getattr(args, name) for name in SCORE_TENSORS)),
        (*options, *(getattr(args, name) for name in SCORE_NUMBERS)),
    )


def backward_args(
    dout: Optional[Tensor], dlse: Optional[Tensor], tensors: Sequence[Optional[Tensor]], options: Sequence[float]
) -> AttentionBackwardArgs:
    """The arguments of the backward of a forward that saved these."""
    more = options[len(BACKWARD_OPTIONS) :]
    if not more:
        return filled(AttentionBackwardArgs, (dout, dlse, *tensors, *options), _AFTER_SM_MARGIN)
    plain, scores = tensors[: -len(SCORE_TENSORS)], tensors[-len(SCORE_TENSORS) :]
    make: Callable[..., AttentionBackwardArgs] = AttentionBackwardArgs  # the saved values have no types
    named = dict(zip((*SCORE_TENSORS, *SCORE_NUMBERS), (*scores, *more)))
    return make(dout, dlse, *plain, *options[: len(BACKWARD_OPTIONS)], **named)


# Of the backward's arguments, the numbers that all calls save.
BACKWARD_OPTIONS = AttentionBackwardArgs._fields[
    AttentionBackwardArgs._fields.index("max_seqlen_q") : AttentionBackwardArgs._fields.index("sm_margin") + 1
]
_AFTER_SM_MARGIN = defaults_after(AttentionBackwardArgs, "sm_margin")


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
    k_token_descale: Optional[Tensor]  # in place of k_descale: of each row, written with new ones; a tensor that an
    v_token_descale: Optional[Tensor]  # operator writes has no default, because torch.library counts on its position
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
    mask_bits: Optional[Tensor] = None  # int32 (1 or batch, mask heads, seqlen_q, words), of the last mask_keys keys
    mask_keys: int = 0

    def named(self) -> dict[str, object]:
        """The options of KVCACHE_OPTIONS that are given, by name."""
        return self.given(KVCACHE_OPTIONS)

    def given(self, names: Sequence[str]) -> dict[str, object]:
        """Those of these fields that differ from their defaults; None is that of fields without one."""
        values = ((name, getattr(self, name)) for name in names)
        return {name: value for name, value in values if _is_given(value, self._field_defaults.get(name))}

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

    def scaling(self) -> dict[str, object]:
        """The arguments of calls with 8-bit tensors alone, which the backends take by name."""
        return {name: getattr(self, name) for name in (*SCALING, "k_token_descale", "v_token_descale")}

    def differentiable(self) -> tuple[Optional[Tensor], ...]:
        """The values of KVCACHE_INPUTS."""
        return self.q, self.k_cache, self.v_cache, self.k, self.v, self.sinks, self.out, self.qv


# Those that the backends take by name: of them calls with qv take the first two alone.
KVCACHE_OPTIONS = ("sinks", "sm_margin", *KvCacheArgs._fields[KvCacheArgs._fields.index("qv") + 1 :])
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
    eight_bit: bool = False  # of an 8-bit cache
    sm_margin: int = 0
    head_dim_v: int = 0  # of the calls' qv; 0: they have none

    def sizes(self) -> tuple[object, ...]:
        """The sizes and options that all backends schedule by."""
        return self[self._fields.index("batch") : self._fields.index("eight_bit")]


_SCHEMA_TYPES = {
    Tensor: "Tensor",
    Optional[Tensor]: "Tensor?",
    Optional[torch.dtype]: "ScalarType?",
    int: "SymInt",
    float: "float",
    bool: "bool",
}


def schema(record: type[NamedTuple], returns: str, written: Optional[Mapping[str, str]] = None) -> str:
    """The schema "(type name, ...) -> returns" of an operator over the fields of a record.

    written: the fields that it writes, each with the letter of its alias set.
    """
    written = written or {}
    return f"({', '.join(_parameter(record, name, written) for name in record._fields)}) -> {returns}"


def _parameter(record: type[NamedTuple], name: str, written: Mapping[str, str]) -> str:
    kind = _SCHEMA_TYPES[record.__annotations__[name]]
    if name in written:
        kind = kind.replace("Tensor", f"Tensor({written[name]}!)")
    default = f"={record._field_defaults[name]}" if name in record._field_defaults else ""
    return f"{kind} {name}{default}"


def attention_gradients(
    values: Sequence[Optional[Tensor]],
    record: type[NamedTuple] = AttentionArgs,
    others: Optional[Mapping[str, Optional[Tensor]]] = None,
) -> tuple[Optional[Tensor], ...]:
    """A gradient for every field of a record: values, one for each of ATTENTION_INPUTS, others, and None elsewhere."""
    given = {**dict(zip(ATTENTION_INPUTS, values)), **(others or {})}
    return tuple(given.get(name) for name in record._fields)
