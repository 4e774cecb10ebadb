"""Sections that several docstrings share. `documented` puts one in place of each line that names it."""

from __future__ import annotations

import re
from collections.abc import Callable
from textwrap import indent
from typing import TypeVar

_MASK = """\
softmax_scale: float, factor of Q K^T before the softmax. Default: 1 / sqrt(head_dim).
causal: bool. A query at position p sees the keys j <= p. Query i of seqlen_q is at p = i + seqlen_k - seqlen_q.
window_size: (left, right) in keys. A query at p sees p - left <= j <= p + right; negative is unbounded."""

_SCORES = f"""\
{_MASK}
softcap: float. If > 0, scores become softcap * tanh(softmax_scale * Q K^T / softcap)."""

_ALIBI = "alibi_slopes: float32 (nheads,) or (batch, nheads), without gradient. Scores get -slope * |p - j|."

_DETERMINISTIC = "deterministic: bool. Makes the backward reproducible to the bit; the forward always is."

_DROPOUT = """\
dropout_p: float in [0, 1). Probability of dropping an entry of the attention matrix; kept ones are scaled by
    1 / (1 - dropout_p). Pass 0.0 in evaluation. `flash_attn.dropout_mask` has the mask."""

_SINKS = """\
sinks, s_aux, learnable_sink: (nheads,) float32 or half precision, one argument of three names. A further
    logit, in natural-log units, in the softmax of every row, without a value. Learnable; -inf is no sink."""

_SCORE_TENSORS = """\
mask: `flash_attn.AttentionMask`, or a bool tensor <of_scores>,
    True where a score takes part (docs/masks.md); causal and window hide further scores. On CUDA without pages
    and 8-bit tensors.
attn_bias: of q's dtype or float32, <of_scores>.
    Added to the scores, after softcap, in natural-log units; -inf hides a score. Learnable.
    On CUDA without 8-bit tensors.
rel_bias: float32 (nheads, 2 R + 1). Adds its column R + clamp(j - p, -R, R) to a score, after softcap, in
    natural-log units. Learnable. On CUDA without 8-bit tensors."""

_LSE_CONVENTION = """\
lse_convention: "fa2": the LSE is a natural logarithm, +inf in a fully masked row; "fa3": -inf there;
    "flashinfer": to base 2, -inf there."""

_OPTIONS = f"""\
{_DROPOUT}
{_SCORES}
{_ALIBI}
{_DETERMINISTIC}
return_attn_probs: bool. Also return softmax_lse and S_dmask."""

_KEYWORDS = f"""\
{_SINKS}
{_SCORE_TENSORS}
return_max_logit: bool. Also return max_logit.
batch_invariant: bool. Results of a sequence (dq only with deterministic) have the same bits in every batch.
    `set_batch_invariant` is the same for all calls.
{_LSE_CONVENTION}"""

_OUT_DTYPE = "out_dtype: float16 or bfloat16, of out where q has 8 bits. Default: that of v, or bfloat16."

_DESCALES = f"""\
q_descale, k_descale, v_descale: scales of 8-bit q (float8_e4m3fn), k and v (float8_e4m3fn or int8): a value is
    the stored value * descale. Forward only, without dropout. A number, or a float32 tensor of one element,
    (nheads,) or (batch, nheads). k and v have nheads_k instead, or one scale per row:
    <rows>. None is 1.
v_descale_axis: "channel" if v_descale is (nheads_k, head_dim_v) or (batch, nheads_k, head_dim_v), else None.
{_OUT_DTYPE}
exp: "fast" lets kernels of 8-bit q, k and v approximate probabilities within 6 % (docs/fp8.md), or "exact"."""

_ERRORS = """\
Raises RuntimeError, TypeError, ValueError or NotImplementedError, which name the argument; nothing is computed
then."""

_RESULT = f"""\
Returns:
    out: <out>, contiguous; alone, or in a tuple with those below that are asked for.
    softmax_lse (return_attn_probs): <lse> float32 (float64 for float64 q). Logarithm of the
        sum of exp(scores) of each row, the sink included.
    S_dmask (return_attn_probs): for tests. (0,), or with dropout the probabilities before it, dropped ones
        negative: (batch, nheads, seqlen_q, seqlen_k), both lengths rounded up to multiples of 128.
    max_logit (return_max_logit): (nheads,), the largest visible logit of each head, without the sink, or -inf.

Gradients: of out and softmax_lse with respect to q, k, v, sinks and biases. They are differentiable again, except
with a mask or a bias. A row that sees no key has out 0.
{_ERRORS}"""

_STRAIGHT_THROUGH = f"""\
{_SCORES}
{_ALIBI}
{_DETERMINISTIC}
return_attn_probs: bool. Also return the LSE.
sinks: (nheads,) float32 or half precision; keyword only. A further logit, in natural-log units, in the softmax
    of every row, without a value. Learnable."""

_FA3_DESCALES = """\
q_descale, k_descale, v_descale: float32 (batch, nheads_k), of float8_e4m3fn q, k and v: values are
    stored value * descale; forward only. One element, or a number, too; q's may be (batch, nheads).
    None is 1. Descales of wider tensors have no effect."""

_FA3_OPTIONS = f"""\
{_SCORES}
{_DETERMINISTIC}
sm_margin: int. Multiprocessors that persistent grids leave to other kernels; on CPU tensors no effect.
return_attn_probs: bool. Also return softmax_lse."""

_FA3_KEYWORDS = f"""\
{_SINKS}
out: a tensor for the result, which is returned; without gradients. float16 or bfloat16 for float8_e4m3fn q."""

_FA3_UNSERVED = """\
attention_chunk: int, must be 0; another value raises NotImplementedError.
qv: must be None; a tensor raises NotImplementedError.
num_splits, pack_gqa: int, bool. FlashAttention-3 has them; they have no effect on the result."""

_FA3_RESULT = f"""\
Returns:
    out: <out> of q's dtype, bfloat16 for float8_e4m3fn q; with return_attn_probs (out, softmax_lse).
    softmax_lse: <lse> float32 (float64 for float64 q), natural logarithm of the sum of
        exp(scores) of each row, the sink included; -inf in a row that sees no key, whose out is 0.

Gradients: of out and softmax_lse with respect to q, k, v and sinks, differentiable again. 8-bit tensors have none.
{_ERRORS}"""

_RING = f"""\
Every rank of `group` calls it with its own tokens, and calls backward. float16 or bfloat16, on CPU tensors float32
and float64 too. K and V move as by method="auto" of a `CpPlan`, which is made, and compared across ranks, when
lengths are new.

Arguments:
{indent(_DROPOUT, "    ")}
{indent(_MASK, "    ")}
    alibi_slopes: float32 <slopes>. Scores get -slope * |p - j|.
{indent(_DETERMINISTIC, "    ")}
    return_attn_probs: bool. Return (out, softmax_lse, None).
    group: a ProcessGroup. Default: all ranks.

Masks, ALiBi and dropout use positions in the whole document. Returns out, like q, or with return_attn_probs also
softmax_lse <lse>, float32 (float64 for float64 q), +inf in a row that sees no key.
Raises RuntimeError, TypeError or ValueError that names the argument, on every rank if the group has a CPU backend."""

_CP_PLAN = """\
mesh: a DeviceMesh of one dimension, or of two, whose ranks ascend along both: heads move along the second,
    K and V along the first. group: instead of mesh, a ProcessGroup or a rank of a LocalGroup. Default: all
    ranks of torch.distributed.
layout: "zigzag" (even work under a causal mask), "contiguous" (the fewest keys to send under a window) or
    "balanced" (the first even one of: contiguous, whole documents, zigzag, chunks assigned by their work);
    or any other as ascending (start, stop) for each rank, or for each row of a mesh of two dimensions.
method: how K and V, or heads, move; see docs/context_parallel.md. "auto" chooses by bytes and memory. With
    a mesh of two dimensions "all_gather", "ring" or "auto", for the first one.
causal, window_size: the mask by which "balanced" counts work. Calls may have any.
tile: long chunks end at multiples of it.
check: equal on every rank. "calls" compares the arguments of every call across ranks, and the order of
    backwards (the default if the group has a CPU backend); "plan" the plan, and the first call and backward
    of each kind (the default otherwise: comparing waits for the GPU); "none" nothing.
copies: whether all_gather copies keys between the GPUs of one host by their copy engines, while messages
    would wait for SMs. The group needs NCCL, and calls of its plans run in one stream."""

SECTIONS = {
    "alibi": _ALIBI,
    "cp_plan": _CP_PLAN,
    "descales": _DESCALES,
    "deterministic": _DETERMINISTIC,
    "dropout": _DROPOUT,
    "errors": _ERRORS,
    "fa3_descales": _FA3_DESCALES,
    "fa3_keywords": _FA3_KEYWORDS,
    "fa3_options": _FA3_OPTIONS,
    "fa3_result": _FA3_RESULT,
    "fa3_unserved": _FA3_UNSERVED,
    "keywords": _KEYWORDS,
    "lse_convention": _LSE_CONVENTION,
    "options": _OPTIONS,
    "out_dtype": _OUT_DTYPE,
    "result": _RESULT,
    "ring": _RING,
    "score_tensors": _SCORE_TENSORS,
    "scores": _SCORES,
    "sinks": _SINKS,
    "straight_through": _STRAIGHT_THROUGH,
}

_Function = TypeVar("_Function", bound=Callable[..., object])


def documented(**given: str) -> Callable[[_Function], _Function]:
    """Replace lines like `<scores>` of a docstring by that section, then `<name>` by the given text of that name."""

    def fill(function: _Function) -> _Function:
        if function.__doc__ is not None:  # None under python -OO
            text = re.sub(r"^( *)<(\w+)>$", lambda m: indent(SECTIONS[m[2]], m[1]), function.__doc__, flags=re.M)
            function.__doc__ = re.sub(r"<(\w+)>", lambda m: given[m[1]], text)
        return function

    return fill
