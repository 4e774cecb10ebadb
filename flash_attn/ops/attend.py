"""From the arguments of a public attention function to its results: all forms, dense and varlen, packed or not."""

from flash_attn.batch_invariance import is_batch_invariant
from flash_attn.eight_bit import EIGHT_BIT
from flash_attn.limits import MAX_HEAD_DIM
from flash_attn.ops import arguments, library, lse, outputs
from flash_attn.ops.attention_args import DENSE, AttentionArgs
from flash_attn.ops.rows import RowsInUse

_NAMES = (("qkv",), ("q", "kv"), ("q", "k", "v"))


def attend(
    inputs, sequences, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
    return_attn_probs, sinks=None, return_max_logit=False, batch_invariant=False, s_aux=None, learnable_sink=None,
    lse_convention="fa2", scaling=None, sm_margin=0, out=None,
):  # fmt: skip
    """What the public function of these inputs, (q, k, v), (q, kv) or (qkv,), and arguments returns.

    scaling: (q_descale, k_descale, v_descale, v_descale_axis, out_dtype, exp) of a function that takes 8-bit tensors.
    sm_margin: multiprocessors that persistent grids leave to other kernels; no effect on the CPU.
    out: None, or with (q, k, v) a tensor for the result, which is returned; without gradients.
    """
    try:
        names, given = _NAMES[len(inputs) - 1], inputs
        varlen = sequences is not DENSE
        if len(inputs) < 3:
            arguments.check_packed(names[-1], inputs[-1], 4 - len(inputs), varlen)
        inputs = arguments.attention_inputs(names, inputs)
        if varlen:
            arguments.check_sequences(sequences)
        head_dim = arguments.head_dim(names[0], inputs[0])
        scale = arguments.scale(softmax_scale, head_dim)
        left, right = arguments.window(window_size)
        if alibi_slopes is not None:
            arguments.check_constant("alibi_slopes", alibi_slopes)
        sink = arguments.named_sinks(sinks, s_aux, learnable_sink)
        if sink is not None:
            sink = arguments.sinks(sink)
        dropout_p, softcap = arguments.number("dropout_p", dropout_p), arguments.number("softcap", softcap)
        causal, deterministic = arguments.flag("causal", causal), arguments.flag("deterministic", deterministic)
        lse.check_convention(lse_convention)
        return_attn_probs = arguments.flag("return_attn_probs", return_attn_probs)
        return_max_logit = arguments.flag("return_max_logit", return_max_logit)
        want_dmask = dropout_p > 0 and return_attn_probs
        *scaling, exp = scaling or (None, None, None, None, None, "exact")
        scaling = arguments.scaling(inputs[0], *scaling) or (None, None, None, False, None)
        fast_exp = arguments.fast_exp(inputs[0], exp)
        # Calls with 8-bit tensors are padded where their operands are made.
        padded = (
            head_dim % 8 != 0 and head_dim < MAX_HEAD_DIM and inputs[0].is_cuda and inputs[-1].dtype not in EIGHT_BIT
        )
        padded = padded and inputs[0].dtype not in EIGHT_BIT
        if padded:
            value_dim = arguments.head_dim(names[-1], inputs[-1])  # another one is the backend's matter
            inputs = arguments.padded(inputs, head_dim)
        max_seqlen_q, max_seqlen_k = arguments.max_seqlens(inputs, sequences, want_dmask) if varlen else (0, 0)
        q, k, v = inputs if len(inputs) == 3 else (*inputs, None, None)[:3]
        args = AttentionArgs(
            q, k, v, sequences.cu_seqlens_q, sequences.cu_seqlens_k, sequences.seqused_k, sequences.leftpad_k,
            sequences.block_table, alibi_slopes, sink, max_seqlen_q, max_seqlen_k, dropout_p, scale, causal, left,
            right, softcap, deterministic, want_dmask, return_max_logit,
            arguments.flag("batch_invariant", batch_invariant) or is_batch_invariant(), *scaling, fast_exp,
            arguments.sm_margin(sm_margin),
        )  # fmt: skip
        if out is not None:
            _, softmax_lse, dmask, _, *max_logit = library.attention_into(args, out, given)
        else:
            out, softmax_lse, dmask, _, *max_logit = library.attention(args)
            if padded:
                out = out[..., :value_dim].contiguous()
        results = (lse.converted(softmax_lse, lse_convention), dmask) if return_attn_probs else ()
        if return_max_logit:
            results += tuple(max_logit)
        return (out, *results) if results else out
    except (RuntimeError, TypeError) as error:
        arguments.rename(error, _callers_names(inputs, sequences, sinks, s_aux, learnable_sink))
        raise


def _callers_names(inputs, sequences, sinks, s_aux, learnable_sink):
    """The names of arguments that a public function has for those of the backends, where they differ."""
    names = {}
    if len(inputs) == 2:
        names = {"k": "kv (its k)", "v": "kv (its v)"}
    if len(inputs) == 1:
        names = dict.fromkeys(("q", "k", "v"), "qkv")
        if sequences is not DENSE:
            names.update(dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), "cu_seqlens"))
            names.update(dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), "max_seqlen"))
    return {**names, "sinks": arguments.name_of_sinks(sinks, s_aux, learnable_sink)}


def attend_rows_in_use(seqused_q, inputs, sequences, *options, out=None, **named):
    """`attend` where only the first rows of each sequence of q are in use: seqused_q (batch,), None for all of them.

    The others come out as rows that belong to no sequence.
    """
    if seqused_q is None:
        return attend(inputs, sequences, *options, out=out, **named)
    q, k, v = inputs = arguments.attention_inputs(_NAMES[2], inputs)
    arguments.check_sequences(sequences)
    arguments.check_rank("q", q, "total, heads, head_dim")
    rows = RowsInUse(sequences.cu_seqlens_q, seqused_q, q)
    if out is not None:
        scaling = named.get("scaling")
        outputs.reject_gradients(out, q, k, v, named.get("sinks"))
        read = {"q": q, "k": k, "v": v, "seqused_q": seqused_q, "sinks": named.get("sinks"), **sequences._asdict()}
        outputs.check_result(out, q, v, scaling[4] if scaling else None, read)
    result = attend((rows.gather(q), k, v), sequences._replace(cu_seqlens_q=rows.cu_seqlens), *options, **named)
    result, *others = result if isinstance(result, tuple) else (result,)
    if len(others) > 1:  # the LSE comes with S_dmask
        others[0] = rows.scatter(others[0], 1)
    result = rows.scatter(result)
    if out is not None:
        result = out.copy_(result)
    return (result, *others) if others else result
