"""Every option on every kind of call: it changes the result as the float64 reference says, or is refused by name.

Options come alone and in pairs. A call that silently ignores an option of OPTIONS fails, and so does an argument of a
public function that is neither in OPTIONS nor in ELSEWHERE.
"""

from __future__ import annotations

import inspect
import itertools
from dataclasses import dataclass, field
from pathlib import Path

import flash_attn_3_harness
import pytest
import torch
from fp8_harness import E4M3, INT8, PLAIN, WIDE_P, dequantized, of_query_heads, relative_rmse
from kvcache_harness import rotated
from reference import attention

from flash_attn import AttentionMask, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.context_parallel import CpPlan, LocalGroup, flash_attn_cp_func

fa3 = flash_attn_3_harness.fa3
B, SQ, SK, H, HK, D = 2, 24, 40, 4, 2, 64
PAGE = 16
ROTARY = 16


@dataclass
class Call:
    """The arguments of a call as it is built, and what the reference has to know of them."""

    device: str
    kind: str
    tensors: dict = field(default_factory=dict)  # q, k, v and what places them
    given: dict = field(default_factory=dict)  # options
    scores: dict = field(default_factory=dict)  # of the reference
    lengths: list = field(default_factory=lambda: [SK] * B)
    leftpad: list = field(default_factory=lambda: [0] * B)
    sequences: list = field(default_factory=lambda: list(range(B)))  # cache_batch_idx
    rotary: tuple | None = None
    changes: bool = False  # whether some option changes the result

    def rand(self, *shape):
        return torch.rand(shape, device=self.device)

    def ints(self, *values):
        return torch.tensor(values, dtype=torch.int32, device=self.device)


def new_call(device, kind):
    """q (B, SQ, H, D), k and v (B, SK, HK, D); packed, in pages or sharded where they are given to the function."""
    call = Call(device, kind)
    dtypes = {"eight_bit": (torch.float16, INT8, INT8), "fp8": (E4M3, E4M3, E4M3)}.get(kind, (torch.float16,) * 3)
    rows = (SQ, SK, SK) if kind != "context_parallel" else (SK, SK, SK)
    for name, n, heads, dtype in zip("qkv", rows, (H, HK, HK), dtypes):
        x = torch.randn(B, n, heads, D, device=device)
        call.tensors[name] = (x * 20).round().to(dtype) if dtype is INT8 else x.to(dtype)
    if kind == "eight_bit":
        for name in "kv":
            call.given[f"{name}_descale"] = torch.full((), 1 / 20, device=device)
    return call


# ---- options: each adds to a call what it gives, and to its reference what it should do ----


def scores(name, value, changes=True, **reference):
    def add(call):
        given = value(call) if callable(value) else value
        call.given[name] = given
        call.scores.update({x: given if y is None else y for x, y in reference.items()})
        call.changes |= changes

    return add


def neutral(name, value):
    return scores(name, value, changes=False)


def out(call):
    shape = call.tensors["q"].shape
    shape = shape if call.kind in ("dense", "cached", "eight_bit", "fp8") else (shape[0] * shape[1], *shape[2:])
    dtype = torch.bfloat16 if call.kind == "fp8" else torch.float16
    call.given["out"] = torch.full(shape, float("nan"), device=call.device, dtype=dtype)


def lengths(name):
    def add(call):
        call.lengths = [SK - 3, SK - 9]
        call.given[name] = call.ints(*call.lengths)
        call.changes = True

    return add


def leftpad(name):
    def add(call):
        call.leftpad = [2, 5]
        call.given[name] = call.ints(*call.leftpad)
        call.changes = True

    return add


def cache_batch_idx(call):
    call.sequences = [1, 0]
    call.given["cache_batch_idx"] = call.ints(1, 0)
    call.changes = True


def rotary(call):
    """With one new row of each sequence, which needs a place: the last of SK. Causal queries have later positions."""
    call.rotary = tuple(call.rand(SK + SQ, ROTARY // 2).to(torch.float16) for _ in range(2))
    call.given.update(zip(("rotary_cos", "rotary_sin"), call.rotary))
    call.given["rotary_interleaved"] = False
    call.changes = True


def scale_of(name, *shape):
    def add(call):
        call.given[f"{name}_descale"] = (call.rand(*shape) + 0.5) * (1 / 20 if call.kind == "eight_bit" else 1)
        call.changes = True

    return add


def channel_scale(call):
    scale_of("v", HK, D)(call)
    call.given["v_descale_axis"] = "channel"


def mask(call):
    """Ranges of keys; those of a sequence count from leftpad on."""
    lo, hi = (torch.randint(first, stop, (SQ,), device=call.device) for first, stop in ((0, 9), (12, SK)))
    copies = B if is_packed(call) else 1
    call.given["mask"] = AttentionMask.query_ranges(lo.repeat(copies), hi.repeat(copies), packed=is_packed(call))
    keys = torch.arange(SK, device=call.device)
    call.scores["mask"] = ((lo[:, None] <= keys) & (keys < hi[:, None])).expand(1, H, SQ, SK)
    call.changes = True


def attn_bias(call):
    bias = torch.randn(1, H, SQ, SK, device=call.device)
    call.given["attn_bias"] = bias[0].repeat(1, B, 1) if is_packed(call) else bias
    call.scores["attn_bias"] = bias.double()
    call.changes = True


def is_packed(call):
    return call.kind in ("packed", "paged")


OPTIONS = {
    "mask": mask,
    "attn_bias": attn_bias,
    "rel_bias": scores("rel_bias", lambda call: torch.randn(H, 11, device=call.device), rel_bias=None),
    "softcap": scores("softcap", 1.0, softcap=None),
    "alibi_slopes": scores("alibi_slopes", lambda call: call.rand(H) + 0.1, alibi_slopes=None),
    "window_size": scores("window_size", (9, 2), window=None),
    "causal": scores("causal", True, causal=None),
    "sinks": scores("sinks", lambda call: call.rand(H) + 3, sinks=None),
    "softmax_scale": scores("softmax_scale", 0.4, scale=None),
    "dropout_p": scores("dropout_p", 0.3),
    "deterministic": neutral("deterministic", True),
    "batch_invariant": neutral("batch_invariant", True),
    "sm_margin": neutral("sm_margin", 3),
    "num_splits": neutral("num_splits", 3),
    "return_max_logit": neutral("return_max_logit", True),
    "exp": neutral("exp", "fast"),
    "out": out,
    "out_dtype": neutral("out_dtype", torch.float16),
    "seqused_k": lengths("seqused_k"),
    "cache_seqlens": lengths("cache_seqlens"),
    "leftpad_k": leftpad("leftpad_k"),
    "cache_leftpad": leftpad("cache_leftpad"),
    "cache_batch_idx": cache_batch_idx,
    "rotary_cos": rotary,
    "q_descale": scale_of("q"),
    "q_descale of heads": scale_of("q", H),
    "q_descale of sequences": scale_of("q", B, HK),
    "k_descale": scale_of("k", HK),
    "k_descale of sequences": scale_of("k", B, HK),
    "k_descale of rows": scale_of("k", B, SK, HK),
    "v_descale": scale_of("v", HK),
    "v_descale of rows": scale_of("v", B, SK, HK),
    "v_descale_axis": channel_scale,
}
FUNCTIONS = (
    flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, flash_attn_cp_func,
    fa3.flash_attn_func, fa3.flash_attn_varlen_func, fa3.flash_attn_with_kvcache,
)  # fmt: skip
# All other arguments: input tensors, and options that another file tests, by file.
INPUTS = {"q", "k", "v", "k_cache", "v_cache", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k",
          "block_table", "rotary_sin", "rotary_interleaved"}  # fmt: skip
ELSEWHERE = {
    "attention/test_sink_names.py": {"s_aux", "learnable_sink"},
    "attention/test_seqused_q.py": {"seqused_q"},
    "attention/test_lse_convention.py": {"lse_convention"},
    "attention/test_interface.py": {"return_attn_probs"},
    "attention/test_flash_attn_3.py": {"cu_seqlens_k_new", "rotary_seqlens", "scheduler_metadata"},
    "attention/test_flash_attn_3_cache.py": {"page_table", "return_softmax_lse"},
    "attention/test_flash_attn_3_errors.py": {"attention_chunk", "pack_gqa"},
    "decode/test_latent.py": {"qv", "q_v"},
    "decode/test_fp8_cache.py": {"k_descale_axis"},
    "decode/test_kvcache_plan.py": {"plan"},
    "decode/test_mask_bits.py": {"mask_bits", "mask_keys"},
}  # fmt: skip
KINDS = ("dense", "packed", "paged", "cached", "eight_bit", "fp8", "context_parallel")


def argument(name):
    return name.split()[0]


# ---- calls ----


def packed_rows(x):
    return x.flatten(0, 1)


def cu_seqlens(call, rows):
    return call.ints(*range(0, (B + 1) * rows, rows))


def pages_of(call):
    """(k, v, block_table): the pages of a sequence are not adjacent."""
    rows = -SK % PAGE
    per = (SK + rows) // PAGE
    order = torch.randperm(B * per)
    table = torch.empty(B * per, dtype=torch.int32)
    table[:] = order.to(torch.int32)
    paged = []
    for x in (call.tensors["k"], call.tensors["v"]):
        padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, rows)).reshape(B * per, PAGE, HK, D)
        pages = torch.empty_like(padded)
        pages[order.to(x.device)] = padded
        paged.append(pages)
    return *paged, table.reshape(B, per).to(call.device)


def run(call):
    """-> (out (B, rows, H, D), S_dmask or None, max_logit or None)"""
    q, k, v = call.tensors.values()
    given = dict(call.given)
    if call.kind == "context_parallel":

        def on_rank(rank):
            plan = CpPlan.dense(SK, group=rank, tile=4)
            result = flash_attn_cp_func(*(plan.shard(x, 1) for x in (q, k, v)), plan=plan, **given)
            return plan.unshard(result, 1)

        return LocalGroup(2).run(on_rank)[0], None, None
    if call.kind == "cached":
        if call.rotary:
            new = call.tensors["new"] = [torch.randn(B, 1, HK, D, device=call.device).half() for _ in "kv"]
            given.update(k=new[0], v=new[1])
        stored = call.ints(*(length - bool(call.rotary) for length in call.lengths))
        given["cache_seqlens"] = stored
        return flash_attn_with_kvcache(q, k, v, **given), None, None
    given["return_attn_probs"] = True
    if call.kind != "paged" and ("sm_margin" in given or "out" in given or "num_splits" in given):
        return run_fa3(call, q, k, v)
    if call.kind in ("packed", "paged"):
        bounds = cu_seqlens(call, SQ), cu_seqlens(call, SK)
        if call.kind == "paged":
            k, v, given["block_table"] = pages_of(call)
            given.setdefault("seqused_k", call.ints(*call.lengths))
        else:
            k, v = packed_rows(k), packed_rows(v)
        result = flash_attn_varlen_func(packed_rows(q), k, v, *bounds, SQ, SK, **given)
        return result[0].unflatten(0, (B, SQ)), result[2], result[3] if len(result) > 3 else None
    result = flash_attn_func(q, k, v, **given)
    return result[0], result[2], result[3] if len(result) > 3 else None


def run_fa3(call, q, k, v):
    """Options of FlashAttention-3, by its functions."""
    given = dict(call.given)
    if call.kind in ("dense", "eight_bit", "fp8"):
        return fa3.flash_attn_func(q, k, v, **given), None, None
    bounds = cu_seqlens(call, SQ), cu_seqlens(call, SK)
    rows = map(packed_rows, (q, k, v))
    result = fa3.flash_attn_varlen_func(*rows, *bounds, max_seqlen_q=SQ, max_seqlen_k=SK, **given)
    return result.unflatten(0, (B, SQ)), None, None


# ---- reference ----


def expected(call, keep=None, plain=False):
    """Attention in float64; plain: without options."""
    scales = {name: call.given.get(f"{name}_descale") for name in "qkv"}
    if plain:
        scales = {name: x if x is not None and x.numel() == 1 and name != "q" else None for name, x in scales.items()}
        if call.kind == "eight_bit":
            scales = {name: 1 / 20 if name in "kv" else None for name in "qkv"}
    q, k, v = (call.tensors[name].to(torch.float64) for name in "qkv")
    q = dequantized(q, of_query_heads(scales["q"], H))
    k, v = (
        x * scales[name] if scales[name] is not None and getattr(scales[name], "shape", ()) == (HK, D)
        else dequantized(x, scales[name])
        for name, x in (("k", k), ("v", v))
    )  # fmt: skip
    outs, logits = [], []
    for i in range(B):
        first, stop = (0, SK) if plain else (call.leftpad[i], call.lengths[i])
        row = i if plain else call.sequences[i]
        q_i, k_i, v_i = q[i : i + 1], k[row : row + 1, :stop], v[row : row + 1, :stop]
        if call.rotary and not plain:
            q_i, k_i, v_i = append_rotated(call, i, stop, q_i, k_i, v_i)
        options = {} if plain else dict(call.scores)
        for name in {"mask", "attn_bias"} & set(options):
            options[name] = options[name][..., : stop - first]
        keep_i = None if keep is None else keep[i : i + 1, :, : q_i.shape[1], : stop - first]
        rp = {} if keep is None else {"keep": keep_i, "rp_dropout": 1 / (1 - 0.3)}
        part = attention(q_i, k_i[:, first:], v_i[:, first:], **options, **rp)
        outs.append(part.out)
        logits.append(part.max_logit)
    return torch.cat(outs), torch.stack(logits).amax(0)


def append_rotated(call, i, stop, q, k, v):
    """The new row at stop - 1, and queries at the positions that rotary embedding counts from there."""
    cos, sin = call.rotary
    masks = call.scores.get("causal") or call.scores.get("window", (-1, -1)) != (-1, -1)
    position = torch.full((SQ,), stop - 1) + (torch.arange(SQ) if masks else 0)
    new_k, new_v = (x[i : i + 1].double() for x in call.tensors["new"])
    k, v = k.clone(), v.clone()
    k[:, stop - 1 :], v[:, stop - 1 :] = rotated(new_k, cos, sin, torch.tensor([stop - 1]), False), new_v
    return rotated(q, cos, sin, position, False), k, v


NEEDED = {"v_descale_axis": ("v_descale",), "rotary_cos": ("rotary_sin", "rotary_interleaved", "k", "v")}
NEEDED |= dict.fromkeys(("attn_bias", "rel_bias"), ("bias",))


def refused(error, names):
    """Whether a message names one of the options, or what comes with it."""
    text = str(error)
    names = [x for name in map(argument, names) for x in (name, *NEEDED.get(name, ()))]
    return any(text.startswith(f"{x}:") or f"'{x}'" in text or f" with a {x} " in text for x in names)


def outcome(device, kind, names):
    """True: as the reference says. False: refused by name."""
    torch.manual_seed(5)
    call = new_call(device, kind)
    for name in names:
        OPTIONS[name](call)
    try:
        result, dmask, max_logit = run(call)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        assert refused(error, names), f"{kind} {names}: {error}"
        return False
    keep = None
    if "dropout_p" in names:
        if dmask is None:  # the mask is unknown: only check that dropout changes the result
            return relative_rmse(result, expected(call)[0]) > 0.05
        keep = dmask >= 0
    reference, logits = expected(call, keep)
    fast = 1.2 if "exp" in names else 1.0
    bound = PLAIN * fast if kind == "fp8" else WIDE_P
    assert relative_rmse(result, reference) <= bound, (kind, names, relative_rmse(result, reference))
    if call.changes:
        assert relative_rmse(expected(call, plain=True)[0], reference) > 2 * bound, f"{names} has to change something"
    if "return_max_logit" in names:
        torch.testing.assert_close(max_logit.double(), logits, rtol=1e-2, atol=1e-2)
    if "out" in names:
        assert result.data_ptr() == call.given["out"].data_ptr()
    return True


def fit(names, name):
    """Whether a call can have both."""
    given = {argument(x).replace("_axis", "") for x in names}
    return argument(name).replace("_axis", "") not in given


def covering(taken, size=6):
    """Yields lists of at most `size` options; every pair that a call can have occurs in one of them."""
    pairs = {x for x in itertools.combinations(taken, 2) if fit(x[:1], x[1])}
    while pairs:
        names = list(min(pairs))
        for name in taken:
            gains = sum((x, name) in pairs or (name, x) in pairs for x in names)
            if len(names) < size and gains > 1 and fit(names, name):
                names.append(name)
        pairs -= {(x, y) for x, y in itertools.permutations(names, 2)}
        yield names


def test_every_argument_is_an_option_here_or_elsewhere():
    tested = {argument(name) for name in OPTIONS}.union(INPUTS, *ELSEWHERE.values())
    assert {name for function in FUNCTIONS for name in inspect.signature(function).parameters} == tested
    for file, names in ELSEWHERE.items():
        text = (Path(__file__).resolve().parents[1] / file).read_text(encoding="utf-8")
        assert {name for name in names if name not in text} == set()


@pytest.mark.parametrize("kind", KINDS)
def test_no_option_is_dropped(device, kind):
    taken = [name for name in OPTIONS if outcome(device, kind, [name])]
    assert {"softcap", "causal", "window_size", "softmax_scale", "sinks"} <= set(taken)
    score_tensors = {"mask", "attn_bias", "rel_bias"}
    takes_mask = kind in (("dense", "packed") if device == "cuda" else ("dense", "packed", "paged", "eight_bit", "fp8"))
    expected = score_tensors if takes_mask else score_tensors - {"mask"} if kind == "paged" else set()
    assert score_tensors & set(taken) == expected
    for names in covering([name for name in taken if " of " not in name]):
        outcome(device, kind, names)
