"""The operators' record of a call from the arguments that a caller may give to the attention functions.

Most arguments have the wanted type already: it is compared first, and a conversion is called only for another one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flash_attn._types import WindowSize
from flash_attn.batch_invariance import is_batch_invariant
from flash_attn.eight_bit import EIGHT_BIT
from flash_attn.limits import MAX_HEAD_DIM
from flash_attn.masks import AttentionMask
from flash_attn.masks.arguments import DEVICES, check_bias, mask_factors, score_columns, with_all_axes
from flash_attn.masks.checks import require
from flash_attn.masks.factors import OF_QUERIES
from flash_attn.ops import arguments, latent
from flash_attn.ops.attention_args import (
    DENSE,
    MASK_TENSORS,
    PLAIN,
    SCORE_NUMBERS,
    SCORE_TENSORS,
    AttentionArgs,
    Options,
    Sequences,
    defaults_after,
    filled,
    replaced,
)
from flash_attn.ops.quant_args import NO_QUANT
from flash_attn.ops.rows import RowsInUse

_FLOAT32, _STRIDED = torch.float32, torch.strided
_NO_OPTIONS = defaults_after(AttentionArgs, "batch_invariant")
NAMES = (("qkv",), ("q", "kv"), ("q", "k", "v"))  # of the inputs in each packing
# Options that are fields of AttentionArgs by the same names.
_TENSORS = tuple(name for name in SCORE_TENSORS if name in Options._fields)
_FORMS: dict[type, Callable[[str, object], object]]
_FORMS = {bool: arguments.flag, int: arguments.integer, float: arguments.number}
_NUMBERS = {name: _FORMS[Options.__annotations__[name]] for name in SCORE_NUMBERS if name in Options._fields}
_SCORES = ("mask", *_TENSORS, *_NUMBERS)


def attention(
    inputs: tuple[Tensor, ...],
    sequences: Sequences,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: WindowSize,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    return_attn_probs: bool,
    sinks: Tensor | None,
    options: Options,
) -> AttentionArgs:
    """AttentionArgs of a call with these inputs, (q, k, v), (q, kv) or (qkv,); padded to a head dim of
    whole 16 bytes where kernels need that."""
    names = NAMES[len(inputs) - 1]
    if len(inputs) < 3:
        arguments.check_packed(names[-1], inputs[-1], 4 - len(inputs), sequences is not DENSE)
    if options.qv is None:
        inputs = arguments.attention_inputs(names, inputs)
    else:
        made = arguments.attention_inputs((*names, options.qv_name), (*inputs, options.qv))
        inputs, options = made[:-1], replaced(options, qv=made[-1])
    q = inputs[0]
    if type(dropout_p) is not float:
        dropout_p = arguments.number("dropout_p", dropout_p)
    if type(softcap) is not float:
        softcap = arguments.number("softcap", softcap)
    if type(causal) is not bool:
        causal = arguments.flag("causal", causal)
    if type(deterministic) is not bool:
        deterministic = arguments.flag("deterministic", deterministic)
    left, right = arguments.window(window_size)
    if alibi_slopes is not None:
        arguments.check_constant("alibi_slopes", alibi_slopes)
    if sinks is not None:
        sinks = arguments.sinks(sinks)
    head_dim = q.size(-1) if q.dim() > 0 else 1  # the dimensions are the backends' matter
    scored_dim = head_dim if options.qv is None else latent.score_dim(q, options.qv)
    if scored_dim == 0:
        arguments.head_dim(names[0], q)
    scale = scored_dim**-0.5 if softmax_scale is None else arguments.number("softmax_scale", softmax_scale)
    wants_dmask = dropout_p > 0 and return_attn_probs
    max_seqlen_q = max_seqlen_k = 0
    if sequences is not DENSE:
        arguments.check_sequences(sequences)
        columns = None if options is PLAIN else score_columns(options.mask, options.attn_bias)
        max_seqlen_q, max_seqlen_k = arguments.max_seqlens(inputs, sequences, wants_dmask, columns)
    if options is not PLAIN:
        check_score_tensors(options, q)  # before anything is launched
    if head_dim % 8 != 0 and _must_pad(inputs, head_dim):
        inputs = arguments.padded(inputs, head_dim)
    k: Tensor | None = None
    v: Tensor | None = None
    if len(inputs) == 3:
        q, k, v = inputs
    elif len(inputs) == 2:
        q, k = inputs
    else:
        (q,) = inputs
    given = (
        q, k, v, sequences.cu_seqlens_q, sequences.cu_seqlens_k, sequences.seqused_k, sequences.leftpad_k,
        sequences.block_table, alibi_slopes, sinks, max_seqlen_q, max_seqlen_k, dropout_p, scale, causal, left, right,
        softcap, deterministic, wants_dmask, False, is_batch_invariant(),
    )  # fmt: skip
    args = filled(AttentionArgs, given, _NO_OPTIONS)
    return args if options is PLAIN else _with_options(args, options)


def converts(inputs: tuple[Tensor, ...], sinks: Tensor | None) -> bool:
    """Whether kernels read other tensors than these: in the dtype of autocast, padded, sinks as float32. False also for
    tensors that `attention` refuses."""
    q = inputs[0]
    for x in inputs:
        if x.dtype is _FLOAT32:
            if arguments.autocasts(q):
                return True
            break
    if sinks is not None and sinks.layout is _STRIDED and (sinks.dtype is not _FLOAT32 or not sinks.is_contiguous()):
        return True
    return _pads(q) and not q.is_nested and q.dim() > 0 and q.size(-1) % 8 != 0


def operands(inputs: tuple[Tensor, ...], is_varlen: bool) -> tuple[Tensor, ...]:
    """The inputs of a call as kernels read them, by operations that autograd records.

    Made last first, since a backward runs in the opposite order: the gradients of one tensor given twice are then added
    as those of a call that converts nothing.
    """
    names = NAMES[len(inputs) - 1]
    if len(inputs) < 3:
        arguments.check_packed(names[-1], inputs[-1], 4 - len(inputs), is_varlen)
    arguments.check_tensors(names, inputs)
    head_dim = arguments.head_dim(names[0], inputs[0])
    made = arguments.attention_inputs(names, inputs[::-1])
    if _must_pad(inputs, head_dim):
        made = arguments.padded(made, head_dim)
    return made[::-1]


def _must_pad(inputs: tuple[Tensor, ...], head_dim: int) -> bool:
    """Whether kernels need `arguments.padded`. 8-bit calls pad the operands that they make."""
    if head_dim > MAX_HEAD_DIM or not _pads(inputs[0]) or inputs[0].dtype in EIGHT_BIT or inputs[-1].dtype in EIGHT_BIT:
        return False
    arguments.head_dim("v", inputs[-1])  # another one is the backend's matter
    return True


def _pads(q: Tensor) -> bool:
    return q.is_cuda


def pad(x: Tensor, columns: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, columns))


def like(x: Tensor, used: Tensor) -> Tensor:
    """x in the dtype and with the zero columns of `used`, which was made of it; differentiable."""
    x, missing = x.to(used.dtype), used.shape[-1] - x.shape[-1]
    return pad(x, missing) if missing else x


def _with_options(args: AttentionArgs, options: Options) -> AttentionArgs:
    is_quantized = options.quant is not NO_QUANT
    fields = options.quant.fields(args.q) if is_quantized else {}
    if any(getattr(options, name) is not Options._field_defaults[name] for name in _SCORES):
        fields.update(_scores(args, options))
    return replaced(
        args,
        return_max_logit=arguments.flag("return_max_logit", options.return_max_logit),
        batch_invariant=arguments.flag("batch_invariant", options.batch_invariant) or args.batch_invariant,
        fast_exp=is_quantized and options.quant.allows_fast_exp(args.q),
        sm_margin=arguments.sm_margin(options.sm_margin),
        qv=options.qv,
        **fields,
    )


def check_score_tensors(options: Options, q: Tensor) -> None:
    """Raise an error that names a mask or a bias which no call takes, whatever its sizes."""
    values = tuple(getattr(options, name) for name in _TENSORS)
    if all(x is None for x in values):
        mask = options.mask
        if mask is None or (type(mask) is AttentionMask and q.device.type in DEVICES):
            return
    names = ("mask", *_TENSORS)
    given = [name for name in names if getattr(options, name) is not None]
    if not given:
        return
    if q.device.type not in DEVICES:
        raise NotImplementedError(
            f"{given[0]}: expected None on {q.device.type}, got one: taken on {', '.join(DEVICES)} alone"
        )
    mask = options.mask if isinstance(options.mask, Tensor) else None
    arguments.check_optional_tensors(names, (mask, *values))
    check_bias(options.attn_bias)


def _scores(args: AttentionArgs, options: Options) -> dict[str, object]:
    """The fields of options of scores, which `check_score_tensors` has passed."""
    is_packed = args.cu_seqlens_q is not None
    seqlen_q, seqlen_k = None, args.max_seqlen_k if is_packed else None
    if not is_packed:
        seqlen_q, seqlen_k = (
            x.shape[1] if x.dim() > 1 else None for x in (args.q, args.q if args.k is None else args.k)
        )
    fields: dict[str, object] = {name: getattr(options, name) for name in _TENSORS}
    fields.update((name, form(name, getattr(options, name))) for name, form in _NUMBERS.items())
    mask = mask_factors(options.mask, is_packed, seqlen_q, seqlen_k)
    if mask is not None:
        fields.update(zip(MASK_TENSORS, mask))
        fields["mask_block_q"], fields["mask_block_k"] = mask.block_size
    return fields


def score_rows(rows: RowsInUse, options: Options, q: Tensor) -> dict[str, AttentionMask | Tensor]:
    """Mask and bias of packed queries whose rows are put in another order."""
    attn_bias, total = options.attn_bias, q.shape[0]
    found: dict[str, AttentionMask | Tensor] = {}
    if isinstance(options.mask, Tensor):
        _check_rows("mask", options.mask, total)
        found["mask"] = rows.gather(options.mask, 1)
    elif options.mask is not None:
        mask = mask_factors(options.mask, packed=True)
        assert mask is not None
        moved: dict[str, Tensor] = {}
        for name, x in mask.tensors().items():
            if name in OF_QUERIES:
                _check_rows(f"mask.{name}", x, total)
                moved[name] = rows.gather(x, 1)
        found["mask"] = AttentionMask(replaced(mask, **moved))
    if attn_bias is not None:
        attn_bias = with_all_axes(attn_bias, packed=True)
        _check_rows("attn_bias", attn_bias, total)
        found["attn_bias"] = rows.gather(attn_bias, 1)
    return found


def _check_rows(name: str, x: Tensor, total: int) -> None:
    require(x.dim() == 3 and x.shape[1] == total, name, f"3 dimensions, the second of {total} rows", list(x.shape))


def callers_names(inputs: tuple[Tensor, ...], sequences: Sequences, options: Options) -> dict[str, str]:
    """The names of arguments that a public function has for those of the backends, where they differ."""
    names = {"sinks": options.sinks_name, "qv": options.qv_name}
    if len(inputs) == 2:
        names.update({"k": "kv (its k)", "v": "kv (its v)"})
    if len(inputs) == 1:
        names.update(dict.fromkeys(("q", "k", "v"), "qkv"))
        if sequences is not DENSE:
            names.update(dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), "cu_seqlens"))
            names.update(dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), "max_seqlen"))
    return names
