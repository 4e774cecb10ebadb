"""Small calls of all public functions, forward and backward, for tests of what all of them promise.

CALLS: name -> call, a function of Inputs that returns tensors in any nesting. Tensors are made on a given device in
given dtypes: what depends on the defaults of PyTorch is a function's doing.
"""

from __future__ import annotations

import contextlib

import flash_attn_3_harness
import torch
import torch.nn.functional as F

import flash_attn
from flash_attn import _self_check, bert_padding, fp8, sdpa
from flash_attn.context_parallel import CpCache, CpPlan, LocalGroup, flash_attn_cp_func, flash_attn_cp_kvcache
from flash_attn.context_parallel.plan.steps import METHODS
from flash_attn.eight_bit import EIGHT_BIT
from flash_attn.integrations import sglang, transformers, transformers_cp, vllm
from flash_attn.layers import rotary
from flash_attn.losses.cross_entropy import CrossEntropyLoss
from flash_attn.modules import mha
from flash_attn.ops.triton import layer_norm
from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
from flash_attn.ops.triton.rotary import apply_rotary
from flash_attn.sdpa import operators
from flash_attn.utils.generation import InferenceParams

fa3 = flash_attn_3_harness.fa3
HEADS, HEADS_K, DIM, ROTARY, CAPACITY = 4, 2, 32, 16, 40
CALLS: dict = {}


class Inputs:
    """Tensors of a call over `batch` sequences of `rows` rows.

    spread: those without elements have last stride 2. scope: makes the context in which threads of a call run.
    """

    def __init__(self, device, batch=2, rows=6, spread=False, scope=contextlib.nullcontext):
        self.device, self.batch, self.rows, self.spread, self.scope = device, batch, rows, spread, scope
        self.total = batch * rows

    def floats(self, *shape, dtype=torch.float16):
        x = torch.randn(shape, device=self.device, dtype=dtype)
        if self.spread and x.numel() == 0:
            x = x.new_empty((*shape[:-1], 2 * shape[-1]))[..., ::2]
        return x.requires_grad_()

    def ints(self, *values, dtype=torch.int32):
        return torch.tensor(values, dtype=dtype, device=self.device)

    def dense(self, *heads):
        return [self.floats(self.batch, self.rows, h, DIM) for h in heads]

    def packed(self, *heads):
        return [self.floats(self.total, h, DIM) for h in heads]

    @property
    def cu_seqlens(self):
        return self.ints(*(i * self.rows for i in range(self.batch + 1)))

    @property
    def lengths(self):
        return self.ints(*(3 + i for i in range(self.batch)))

    def tables(self):
        return [self.floats(CAPACITY, ROTARY // 2).detach() for _ in range(2)]

    def slopes(self):
        return torch.rand(HEADS, device=self.device, dtype=torch.float32)

    def sinks(self):
        return self.floats(HEADS, dtype=torch.float32)

    def caches(self):
        return [self.floats(self.batch, CAPACITY, HEADS_K, DIM).detach() for _ in range(2)]

    def pages(self):
        """(k, v, block_table): five pages of 8 rows for each sequence."""
        caches = [self.floats(5 * self.batch, 8, HEADS_K, DIM).detach() for _ in range(2)]
        table = torch.arange(5 * self.batch, dtype=torch.int32, device=self.device).view(self.batch, 5)
        return *caches, table


def _call(call):
    CALLS[call.__name__] = call
    return call


def _with_gradients(results, *leaves):
    """(results, gradients of the leaves) from those of all floating point results that have a history."""
    outputs = results if isinstance(results, tuple) else (results,)
    outputs = [x for x in outputs if isinstance(x, torch.Tensor) and x.grad_fn is not None]
    return results, torch.autograd.grad(outputs, leaves, [torch.ones_like(x) for x in outputs])


SCORES = {"causal": True, "softcap": 3.0, "return_attn_probs": True, "deterministic": True}


# ---- attention ----


@_call
def dense(x):
    q, k, v = x.dense(HEADS, HEADS_K, HEADS_K)
    sinks = x.sinks()
    results = flash_attn.flash_attn_func(
        q, k, v, 0.25, alibi_slopes=x.slopes(), sinks=sinks, return_max_logit=True, **SCORES
    )
    return _with_gradients(results, q, k, v, sinks)


@_call
def dense_without_options(x):
    q, k, v = x.dense(HEADS, HEADS_K, HEADS_K)
    return _with_gradients(flash_attn.flash_attn_func(q, k, v, deterministic=True), q, k, v)


@_call
def dense_batch_invariant(x):
    q, k, v = x.dense(HEADS, HEADS_K, HEADS_K)
    return _with_gradients(flash_attn.flash_attn_func(q, k, v, batch_invariant=True, **SCORES), q, k, v)


@_call
def tangents(x):
    q, k, v = x.dense(HEADS, HEADS_K, HEADS_K)
    sinks, options = x.sinks(), {"causal": True, "softcap": 3.0, "deterministic": True, "dropout_p": 0.25}
    given = [y.detach() for y in (q, k, v)]
    results = flash_attn.flash_attn_jvp(
        q, k, v, *given, sinks=sinks, tsinks=sinks.detach(), alibi_slopes=x.slopes(), **options
    )
    return _with_gradients(results, q, k, v, sinks)


@_call
def second_derivatives(x):
    q, k, v = x.packed(HEADS, HEADS_K, HEADS_K)
    lengths = x.cu_seqlens, x.cu_seqlens, x.rows, x.rows
    out = flash_attn.flash_attn_varlen_func(q, k, v, *lengths, 0.25, causal=True, deterministic=True)
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out), create_graph=True)
    return torch.autograd.grad(grads, (q, k, v), [y.detach() for y in grads])


@_call
def qkvpacked(x):
    qkv = x.floats(x.batch, x.rows, 3, HEADS, DIM)
    return _with_gradients(flash_attn.flash_attn_qkvpacked_func(qkv, 0.25, **SCORES), qkv)


@_call
def kvpacked(x):
    q, kv = x.dense(HEADS)[0], x.floats(x.batch, x.rows, 2, HEADS_K, DIM)
    return _with_gradients(flash_attn.flash_attn_kvpacked_func(q, kv, **SCORES), q, kv)


@_call
def varlen(x):
    q, k, v = x.packed(HEADS, HEADS_K, HEADS_K)
    sinks = x.sinks()
    results = flash_attn.flash_attn_varlen_func(
        q, k, v, x.cu_seqlens, x.cu_seqlens, x.rows, x.rows, 0.25, alibi_slopes=x.slopes(), sinks=sinks,
        return_max_logit=True, **SCORES,
    )  # fmt: skip
    return _with_gradients(results, q, k, v, sinks)


@_call
def varlen_packed(x):
    qkv = x.floats(x.total, 3, HEADS, DIM)
    q, kv = x.packed(HEADS)[0], x.floats(x.total, 2, HEADS_K, DIM)
    lengths = (x.cu_seqlens, x.rows)
    both = (x.cu_seqlens, x.cu_seqlens, x.rows, x.rows)
    return (
        _with_gradients(flash_attn.flash_attn_varlen_qkvpacked_func(qkv, *lengths, **SCORES), qkv),
        _with_gradients(flash_attn.flash_attn_varlen_kvpacked_func(q, kv, *both, **SCORES), q, kv),
    )


@_call
def varlen_over_pages(x):
    k, v, table = x.pages()
    return flash_attn.flash_attn_varlen_func(
        x.packed(HEADS)[0].detach(), k, v, x.cu_seqlens, x.cu_seqlens, x.rows, CAPACITY, block_table=table,
        seqused_k=x.lengths, leftpad_k=torch.ones_like(x.lengths),
    )  # fmt: skip


@_call
def queries_in_use(x):
    q, k, v = x.packed(HEADS, HEADS_K, HEADS_K)
    lengths = (x.cu_seqlens, x.cu_seqlens, x.rows, x.rows)
    return _with_gradients(fa3.flash_attn_varlen_func(q, k, v, *lengths, seqused_q=x.lengths), q, k, v)


@_call
def dropout_and_its_mask(x):
    q, k, v = (y.detach() for y in x.dense(HEADS, HEADS_K, HEADS_K))
    out, lse, dmask, state = torch.ops.flash_attn._flash_attn_forward(q, k, v, 0.3, 0.2, False, -1, -1, 0.0, None, True)
    mask = flash_attn.dropout_mask(state, 0.3, x.batch, HEADS, x.rows, x.rows)
    grads = [torch.empty_like(y) for y in (q, k, v)]
    softmax_d = torch.ops.flash_attn._flash_attn_backward(
        out, q, k, v, out, lse, *grads, 0.3, 0.2, False, -1, -1, 0.0, None, True, state
    )
    return out, lse, dmask, state, mask, grads, softmax_d


@_call
def explanations(x):
    q, k, v = x.dense(HEADS, HEADS_K, HEADS_K)
    plans = flash_attn.explain(q, k, v, dropout_p=0.1), flash_attn.explain(
        flash_attn.flash_attn_with_kvcache, q.detach(), *x.caches(), cache_seqlens=x.lengths
    )  # fmt: skip
    return [[str(plan) for plan in plans]]


@_call
def self_check(x):
    return [[check.ok for check in _self_check.check_device(x.device, (torch.float16,), (DIM,))]]


# ---- decoding ----


@_call
def cache(x):
    q, k, v = (y.detach() for y in x.dense(HEADS, HEADS_K, HEADS_K))
    (cos, sin), caches = x.tables(), x.caches()
    results = flash_attn.flash_attn_with_kvcache(
        q, *caches, k, v, cos, sin, x.lengths, causal=True, alibi_slopes=x.slopes(), sinks=x.sinks().detach(),
        return_softmax_lse=True,
    )  # fmt: skip
    return results, caches


@_call
def cache_in_pages(x):
    (k, v, table), new = x.pages(), [y.detach() for y in x.dense(HEADS_K, HEADS_K)]
    q = x.dense(HEADS)[0].detach()
    return flash_attn.flash_attn_with_kvcache(q, k, v, *new, cache_seqlens=x.lengths, block_table=table), k, v


@_call
def cache_with_a_number_as_length(x):
    q = x.dense(HEADS)[0].detach()
    return flash_attn.flash_attn_with_kvcache(q, *x.caches(), cache_seqlens=7, batch_invariant=True)


@_call
def cache_of_8_bits(x):
    q, k, v = (y.detach() for y in x.dense(HEADS, HEADS_K, HEADS_K))
    stored = [fp8.quantize(y)[0] for y in x.caches()]
    out = flash_attn.flash_attn_with_kvcache(
        q, *stored, k, v, cache_seqlens=x.lengths, k_descale=0.5, v_descale=torch.full_like(x.slopes()[:1], 0.25)
    )
    return out, [y.float() for y in stored]


@_call
def plan(x):
    q, k, v = (y.detach() for y in x.dense(HEADS, HEADS_K, HEADS_K))
    options = {"causal": True, "seqlen_new": x.rows}
    made = flash_attn.KvCachePlan(x.lengths, x.rows, HEADS, HEADS_K, DIM, CAPACITY, **options)
    made.update(x.lengths + 1)
    out = torch.empty_like(q)
    flash_attn.flash_attn_with_kvcache(
        q, *x.caches(), k, v, cache_seqlens=x.lengths + 1, causal=True, plan=made, out=out
    )
    return out


@_call
def combine(x):
    parts, lses = x.floats(3, x.batch, x.rows, HEADS, DIM), x.floats(3, x.batch, x.rows, HEADS, dtype=torch.float32)
    given = x.floats(x.batch, x.rows, HEADS, DIM).detach()
    return (
        _with_gradients(flash_attn.flash_attn_combine(parts, lses), parts, lses),
        flash_attn.flash_attn_combine(parts.detach(), lses.detach(), out=given),
        flash_attn.flash_attn_combine(parts.detach(), lses.detach(), out_dtype=torch.float32),
    )


# ---- 8 bits ----


@_call
def quantisation(x):
    q, k, v = x.dense(HEADS, HEADS_K, HEADS_K)
    whole = fp8.quantize_qkv(q, k, v, rotate=True)
    parts = [fp8.quantize(k, name, dtype) for name in ("tensor", "head", "token", "channel") for dtype in EIGHT_BIT]
    q8, k8, v8, *descales, _ = whole
    names = ("q_descale", "k_descale", "v_descale")
    out = flash_attn.flash_attn_func(q8, k8, v8, **dict(zip(names, descales)))
    return [y.float() for y in whole], [[y.float() for y in part] for part in parts], out


@_call
def straight_through(x):
    q, k, v = x.dense(HEADS, HEADS_K, HEADS_K)
    rows = x.packed(HEADS, HEADS_K, HEADS_K)
    lengths = (x.cu_seqlens, x.cu_seqlens, x.rows, x.rows)
    options = {"return_attn_probs": True, "deterministic": True}
    return (
        _with_gradients(fp8.flash_attn_straight_through_func(q, k, v, **options), q, k, v),
        _with_gradients(fp8.flash_attn_varlen_straight_through_func(*rows, *lengths, **options), *rows),
    )


# ---- around attention ----


@_call
def padding(x):
    hidden = x.floats(2, 6, DIM)
    mask, lengths = x.ints(1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 0).view(2, 6), x.ints(*[2, 3, 0, 0, 0, 0] * 2).view(2, 6)
    rows, indices, cu_seqlens, _, used = bert_padding.unpad_input(hidden, mask)
    padded = bert_padding.pad_input(rows, indices, 2, 6)
    other = bert_padding.unpad_input_for_concatenated_sequences(hidden, lengths)
    return _with_gradients((rows, padded, other[0]), hidden), indices, cu_seqlens, used, other


@_call
def rotary_functions(x):
    y, cos, sin = x.dense(HEADS)[0], *x.tables()
    qkv, kv = x.floats(x.batch, x.rows, 3, HEADS, DIM), x.floats(x.batch, x.rows, 2, HEADS_K, DIM)
    packed = x.packed(HEADS)[0].detach()
    return (
        _with_gradients(rotary.apply_rotary_emb(y, cos, sin, seqlen_offsets=x.lengths), y),
        rotary.apply_rotary_emb(packed, cos, sin, True, cu_seqlens=x.cu_seqlens, max_seqlen=x.rows),
        _with_gradients(rotary.apply_rotary_emb_qkv_(qkv * 1, cos, sin), qkv),
        _with_gradients(rotary.apply_rotary_emb_kv_(kv * 1, cos, sin, interleaved=True), kv),
        apply_rotary(y.detach(), cos, sin, conjugate=True),
    )


@_call
def rotary_modules(x):
    results = []
    for scale_base in (None, 512):
        module = rotary.RotaryEmbedding(ROTARY, scale_base=scale_base, device=x.device)
        qkv, q, kv = x.floats(x.batch, x.rows, 3, HEADS, DIM).detach(), *x.dense(HEADS), x.floats(
            x.batch, x.rows, 2, HEADS_K, DIM
        ).detach()  # fmt: skip
        results += [module(qkv), module(q.detach(), kv, seqlen_offset=x.lengths, max_seqlen=CAPACITY), module.inv_freq]
    return results


@_call
def norms(x):
    y, residual, other = (x.floats(x.batch, x.rows, DIM) for _ in range(3))
    weight, bias = x.floats(DIM), x.floats(DIM)
    matrix = x.floats(8, DIM)
    options = {"prenorm": True, "residual": residual, "residual_in_fp32": True}
    module = layer_norm.RMSNorm(DIM, dropout_p=0.2, device=x.device, dtype=torch.float16)
    dropped = layer_norm.layer_norm_fn(y, weight, bias, x1=other, dropout_p=0.3, return_dropout_mask=True)
    return (
        _with_gradients(layer_norm.layer_norm_fn(y, weight, bias, **options), y, residual, weight, bias),
        _with_gradients(layer_norm.rms_norm_fn(y, weight, None, **options), y, residual, weight),
        _with_gradients(layer_norm.layer_norm_linear_fn(y, weight, bias, matrix, None), y, weight, bias, matrix),
        _with_gradients(module(y), y, module.weight),
        _with_gradients(dropped, y, other, weight),
        layer_norm.layer_norm_ref(y, weight, bias, dropout_p=0.3, upcast=True),
        layer_norm.rms_norm_ref(y, weight, bias),
    )


@_call
def losses(x):
    logits, labels = x.floats(x.total, 11), torch.arange(x.total, device=x.device) % 11
    options = {"label_smoothing": 0.1, "lse_square_scale": 1e-3}
    return (
        _with_gradients(cross_entropy_loss(logits, labels, **options), logits),
        _with_gradients(CrossEntropyLoss(return_z_loss=True, **options)(logits, labels), logits),
        CrossEntropyLoss(reduction="none")(logits, labels),
    )


def _mha(x, **options):
    return mha.MHA(HEADS * DIM, HEADS, device=x.device, dtype=torch.float16, causal=True, layer_idx=0, **options)


@_call
def modules(x):
    hidden = x.floats(x.batch, x.rows, HEADS * DIM)
    rotates = {"num_heads_kv": HEADS_K, "rotary_emb_dim": ROTARY}
    results = []
    for options in (
        {"use_flash_attn": True, "use_alibi": True},
        {"use_flash_attn": True, "window_size": (3, 0), **rotates},
        {"use_flash_attn": True, "return_residual": True, "checkpointing": True},
        {"use_flash_attn": True, "cross_attn": True},
        {**rotates},
    ):
        module = _mha(x, **options)
        results.append(_with_gradients(module(hidden), hidden, *module.parameters()))
    return results


@_call
def generation(x):
    results = []
    for use_alibi in (False, True):
        module = _mha(x, use_flash_attn=True, rotary_emb_dim=ROTARY, use_alibi=use_alibi).eval()
        params = InferenceParams(max_seqlen=CAPACITY, max_batch_size=x.batch)
        params.key_value_memory_dict[0] = module.allocate_inference_cache(x.batch, CAPACITY, torch.float16).zero_()
        for tokens in (x.rows, 1):
            with torch.no_grad():
                results.append(module(x.floats(x.batch, tokens, HEADS * DIM), inference_params=params))
            params.seqlen_offset += tokens
    return results


# ---- context parallelism ----


def _on_ranks(x, function, ranks=2):
    def run(rank):
        with x.scope():
            return function(rank)

    return LocalGroup(ranks).run(run)


@_call
def context_parallel(x):
    q, k, v = (y.detach() for y in x.packed(HEADS, HEADS_K, HEADS_K))
    sinks, slopes, seed = x.sinks().detach(), x.slopes(), x.ints(3, dtype=torch.int64)
    bounds = [i * x.rows for i in range(x.batch + 1)]

    def run(rank, method):
        plan = CpPlan.varlen(bounds, group=rank, method=method)
        own = [plan.shard(y, 0).requires_grad_() for y in (q, k, v)]
        options = {"causal": True, "sinks": sinks, "alibi_slopes": slopes, "deterministic": True}
        out, lse, _ = flash_attn_cp_func(*own, plan=plan, return_attn_probs=True, **options)
        grads = torch.autograd.grad((out, lse), own, (torch.ones_like(out), torch.ones_like(lse)))
        indices = plan.token_indices(x.device)
        return plan.unshard(out.detach(), 0), lse.detach(), grads, plan.positions(x.device), indices, seed

    return [_on_ranks(x, lambda rank, m=method: run(rank, m)) for method in METHODS]


@_call
def context_parallel_dropout(x):
    q, k, v = (y.detach() for y in x.dense(HEADS, HEADS_K, HEADS_K))
    wide = [y.repeat(1, 6, 1, 1) for y in (q, k, v)]

    def run(rank):
        plan = CpPlan.dense(wide[0].shape[1], group=rank, tile=16)
        own = [plan.shard(y, 1) for y in wide]
        out, lse, state = flash_attn_cp_func(*own, plan=plan, dropout_p=0.2, return_attn_probs=True)
        return out.shape, lse.shape, out.device, out.dtype, state.new_zeros(state.shape)  # ranks draw in any order

    return _on_ranks(x, run)


@_call
def context_parallel_cache(x):
    q, (k, v), lengths = x.dense(HEADS)[0].detach(), x.caches(), x.lengths

    def run(rank):
        shards = CpCache(group=rank)
        return flash_attn_cp_kvcache(q, k, v, lengths, shards=shards, return_softmax_lse=True, causal=True)

    return _on_ranks(x, run)


@_call
def context_parallel_mesh(x):
    q, k, v = (y.detach() for y in x.dense(HEADS, HEADS_K, HEADS_K))

    def run(rank):
        plan = CpPlan.dense(x.rows, mesh=rank.mesh(2, 2))
        return flash_attn_cp_func(*(plan.shard(y, 1) for y in (q, k, v)), plan=plan, causal=True)

    return _on_ranks(x, run, 4)


# ---- clients ----


@_call
def sdpa_scope(x):
    q, k, v = x.dense(HEADS, HEADS, HEADS)
    with sdpa.use((x.device,)):
        out = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)), is_causal=True)
    if out.numel() == 0:  # torch computes it, which gives it a history or none
        return out.detach()
    return _with_gradients(out, q, k, v)


@_call
def sdpa_operators(x):
    q, k, v = (y.detach() for y in x.dense(HEADS, HEADS, HEADS))
    heads_first = [y.transpose(1, 2) for y in (q, k, v)]
    out, lse, *_, sq, sk, state, offset, _ = operators.sdpa_forward(*heads_first)
    rows = [y.detach() for y in x.packed(HEADS, HEADS, HEADS)]
    packed = (x.cu_seqlens, x.cu_seqlens, x.rows, x.rows, 0.0, False)
    packed_out, packed_lse, packed_state, unused, _ = operators.flash_forward(*rows, *packed, False)
    return (
        out, lse, operators.sdpa_backward(out, *heads_first, out, lse, None, None, sq, sk, 0.0, False, state, offset),
        packed_out, packed_lse, operators.flash_forward_inplace(packed_out.clone(), *rows, *packed, False),
        operators.flash_backward(packed_out, *rows, packed_out, packed_lse, *packed, packed_state, unused),
    )  # fmt: skip


@_call
def flash_attn_3(x):
    q, k, v = x.dense(HEADS, HEADS_K, HEADS_K)
    rows = x.packed(HEADS, HEADS_K, HEADS_K)
    qkv, lengths = x.floats(x.batch, x.rows, HEADS + 2 * HEADS_K, DIM), (x.cu_seqlens, x.cu_seqlens, x.rows, x.rows)
    parts, lses = x.floats(3, x.batch, x.rows, HEADS, DIM), x.floats(3, x.batch, x.rows, HEADS, dtype=torch.float32)
    options = {"return_attn_probs": True, "deterministic": True}
    return (
        _with_gradients(fa3.flash_attn_func(q, k, v, **options), q, k, v),
        fa3.flash_attn_func(q.detach(), k.detach(), v.detach(), out=torch.empty_like(q)),
        _with_gradients(fa3.flash_attn_qkvpacked_func(qkv, num_heads_q=HEADS, **options), qkv),
        _with_gradients(fa3.flash_attn_varlen_func(*rows, *lengths, **options), *rows),
        fa3.flash_attn_combine(parts.detach(), lses.detach()),
        fa3.get_scheduler_metadata(x.batch, x.rows, CAPACITY, HEADS, HEADS_K, DIM, x.lengths),
    )


@_call
def flash_attn_3_cache(x):
    q, k, v = (y.detach() for y in x.dense(HEADS, HEADS_K, HEADS_K))
    pages_k, pages_v, table = x.pages()
    packed = x.packed(HEADS)[0].detach()
    cos, sin = x.tables()
    return (
        fa3.flash_attn_with_kvcache(q, *x.caches(), k, v, None, cos, sin, x.lengths, causal=True),
        fa3.flash_attn_with_kvcache(
            packed, pages_k, pages_v, cache_seqlens=x.lengths, page_table=table, cu_seqlens_q=x.cu_seqlens,
            max_seqlen_q=x.rows, return_softmax_lse=True,
        ),
        fa3.flash_attn_with_kvcache(q, *x.caches(), cache_seqlens=5),
    )  # fmt: skip


@_call
def servers(x):
    q, (k, v, table), cu_seqlens = x.packed(HEADS)[0].detach(), x.pages(), x.cu_seqlens
    dense, caches = [y.detach() for y in x.dense(HEADS, HEADS_K, HEADS_K)], x.caches()
    given = torch.empty_like(q)
    vllm.flash_attn_varlen_func(
        q, k, v, x.rows, cu_seqlens, CAPACITY, seqused_k=x.lengths, causal=True, block_table=table, out=given
    )
    return (
        given,
        sglang.flash_attn_with_kvcache(
            q, k, v, page_table=table, cache_seqlens=x.lengths, cu_seqlens_q=cu_seqlens, max_seqlen_q=x.rows,
            causal=True,
        ),
        sglang.flash_attn_with_kvcache(dense[0], *caches, *dense[1:], cache_seqlens=x.lengths, causal=True),
        sglang.flash_attn_varlen_func(q, q[:, :HEADS_K], q[:, :HEADS_K], cu_seqlens, cu_seqlens, x.rows, x.rows),
    )  # fmt: skip


@_call
def transformers_attention(x):
    q, k, v = (y.transpose(1, 2) for y in x.dense(HEADS, HEADS_K, HEADS_K))
    module = torch.nn.Identity()
    masks = [None]
    if x.batch == 2 and x.rows == 6:
        masks += [x.ints(*values).view(2, 6).bool() for values in ([1] * 11 + [0], [1, 0, 1] * 4, [0] * 2 + [1] * 10)]
    positions = torch.arange(x.rows, device=x.device).remainder(4)[None]
    results = [_with_gradients(transformers.attention(module, q, k, v, mask)[0], q, k, v) for mask in masks]
    with torch.no_grad():
        results += [transformers.attention(module, q, k, v, mask)[0] for mask in masks]
        results.append(transformers.attention(module, q, k, v, None, position_ids=positions)[0])
        if x.batch == 2 and x.rows == 6:
            results.append(transformers.padding_mask(2, 1, 6, 3, attention_mask=masks[1], device=x.device))
    return results


@_call
def transformers_context_parallel(x):
    q, k, v = x.dense(HEADS, HEADS_K, HEADS_K)
    ids = torch.arange(x.total, device=x.device).view(x.batch, x.rows)

    def run(rank):
        plan = CpPlan.dense(x.rows, group=rank)
        inputs = transformers_cp.context_parallel_inputs(plan, ids, ids)
        own = (plan.shard(y.detach(), 1).transpose(1, 2) for y in (q, k, v))
        out, _ = transformers_cp.context_parallel_attention(
            torch.nn.Identity(), *own, None, position_ids=inputs["position_ids"], cp_plan=plan
        )
        return out, [y for y in inputs.values() if isinstance(y, torch.Tensor)]

    return _on_ranks(x, run)
