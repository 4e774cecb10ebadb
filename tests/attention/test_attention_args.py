"""The records of the operators' arguments: schemas, what the forward saves and the places of gradients follow.

Field names replace tensors: each value then shows where it came from.
"""

import ast
import re
from pathlib import Path

import pytest
import torch

import flash_attn
from flash_attn.masks import MaskFactors
from flash_attn.ops.attention_args import (
    ATTENTION_INPUTS,
    BACKWARD_INPUTS,
    FORWARD_ONLY,
    KVCACHE_INPUTS,
    KVCACHE_OPTIONS,
    MASK_TENSORS,
    NAMED_OPTIONS,
    SCORES,
    AttentionArgs,
    AttentionBackwardArgs,
    KvCacheArgs,
    KvCachePlanArgs,
    attention_gradients,
    backward_args,
    saved_for_backward,
    schema,
)

OPERATORS = {
    "fwd": AttentionArgs,
    "bwd": AttentionBackwardArgs,
    "kvcache_fwd": KvCacheArgs,
    "kvcache_append_fwd": KvCacheArgs,
    "kvcache_plan": KvCachePlanArgs,
}
BIAS = torch.zeros(1, 1, 1, 1)  # with all axes
BLOCK_SIZE = ("mask_block_q", "mask_block_k")  # of a mask_block_map
NO_SCORES = {name: AttentionArgs._field_defaults[name] for name in SCORES}


def names(record):
    return record(*record._fields)


def operator_schema(name):
    return getattr(torch.ops.flash_attn_core, name).default._schema


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_take_the_record_by_position(name):
    record, arguments = OPERATORS[name], operator_schema(name).arguments
    assert tuple(argument.name for argument in arguments) == record._fields
    assert {a.name: a.default_value for a in arguments if a.has_default_value()} == record._field_defaults


@pytest.mark.parametrize("record", (AttentionArgs, AttentionBackwardArgs))
def test_named_options_are_passed_where_they_are_given(record):
    factors = MaskFactors(*MASK_TENSORS, block_size=("mask_block_q", "mask_block_k"))
    own = {name: name for name in NAMED_OPTIONS}
    every = names(record)._replace(attn_bias=BIAS)
    assert every.named() == {**own, "sm_margin": "sm_margin", "mask": factors, "attn_bias": BIAS}
    plain = names(record)._replace(sinks=None, sm_margin=0, **NO_SCORES)
    assert plain.named() == {} and not plain.has_score_tensors()
    for name in SCORES:
        given = plain._replace(**{name: BIAS if name == "attn_bias" else name})
        passed = "mask" if name in MASK_TENSORS else name
        assert given.has_score_tensors() and list(given.named()) == ([] if name in BLOCK_SIZE else [passed])
    if record is AttentionBackwardArgs:
        assert plain._replace(bias_grad=False).named() == {}
        given = plain._replace(bias_grad=False, attn_bias=BIAS).named()
        assert given == {"attn_bias": BIAS, "bias_grad": False}


def test_named_options_of_a_cache_are_passed_where_they_are_given():
    assert names(KvCacheArgs).named() == {name: name for name in KVCACHE_OPTIONS}
    plain = names(KvCacheArgs)._replace(**{name: KvCacheArgs._field_defaults[name] for name in KVCACHE_OPTIONS})
    assert plain.named() == {}
    for name in KVCACHE_OPTIONS:
        assert plain._replace(**{name: name}).named() == {name: name}


def without_defaults(name):
    """The schema of an operator without the arguments that programs may leave out."""
    return re.sub(r", [\w?]+ \w+=[^,)]+", "", str(operator_schema(name)))


def test_schemas_are_those_of_before():
    """Exported programs hold these: a change of one makes them unreadable, but for arguments that have a default."""
    for name in ("fwd", "bwd"):
        assert " bool batch_invariant=False" in str(operator_schema(name))
    assert without_defaults("fwd") == (
        "flash_attn_core::fwd(Tensor q, Tensor? k, Tensor? v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
        "Tensor? seqused_k, Tensor? leftpad_k, Tensor? block_table, Tensor? alibi_slopes, Tensor? sinks, "
        "SymInt max_seqlen_q, SymInt max_seqlen_k, float dropout_p, float softmax_scale, bool causal, "
        "SymInt window_left, SymInt window_right, float softcap, bool deterministic, bool return_softmax, "
        "bool return_max_logit) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    )
    assert without_defaults("bwd") == (
        "flash_attn_core::bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor? k, Tensor? v, Tensor out, Tensor lse, "
        "Tensor rng_state, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? alibi_slopes, Tensor? sinks, "
        "SymInt max_seqlen_q, SymInt max_seqlen_k, float dropout_p, float softmax_scale, bool causal, "
        "SymInt window_left, SymInt window_right, float softcap, bool deterministic) "
        "-> Tensor[]"
    )
    assert str(operator_schema("kvcache_append_fwd")) == (
        "flash_attn_core::kvcache_append_fwd(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? k, Tensor? v, "
        "Tensor? rotary_cos, Tensor? rotary_sin, Tensor? cache_seqlens, Tensor? cache_batch_idx, "
        "Tensor? cache_leftpad, Tensor? block_table, Tensor? alibi_slopes, Tensor(c!)? out, Tensor(d!)? plan, "
        "Tensor(e!)? k_token_descale, Tensor(f!)? v_token_descale, "
        "float softmax_scale, bool causal, SymInt window_left, SymInt window_right, float softcap, "
        "bool rotary_interleaved, SymInt num_splits, bool batch_invariant, Tensor? sinks=None, "
        "Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, bool v_per_channel=False, "
        "ScalarType? out_dtype=None, SymInt sm_margin=0, Tensor? qv=None, "
        "Tensor? mask_bits=None, SymInt mask_keys=0) -> (Tensor, Tensor)"
    )
    assert str(operator_schema("kvcache_plan")) == (
        "flash_attn_core::kvcache_plan(Tensor cache_seqlens, Tensor? cache_leftpad, Tensor(a!) plan, SymInt batch, "
        "SymInt seqlen_q, SymInt seqlen_new, SymInt heads, SymInt heads_k, SymInt head_dim, SymInt seqlen_cache, "
        "bool causal, SymInt window_left, SymInt window_right, SymInt num_splits, bool batch_invariant, "
        "bool eight_bit=False, SymInt sm_margin=0, SymInt head_dim_v=0) -> ()"
    )


def test_only_the_written_fields_are_marked():
    text = schema(KvCacheArgs, "Tensor", written={"out": "c"})
    assert "Tensor(c!)? out" in text and text.count("!") == 1
    assert schema(KvCacheArgs, "Tensor").count("!") == 0


def test_differentiable_values_are_those_named():
    assert names(AttentionArgs).differentiable() == ATTENTION_INPUTS
    assert names(AttentionBackwardArgs).differentiable() == BACKWARD_INPUTS
    assert names(KvCacheArgs).differentiable() == KVCACHE_INPUTS


def test_the_backward_takes_each_argument_of_its_forward():
    tensors, options = saved_for_backward(names(AttentionArgs), "out", "lse", "rng_state")
    every = names(AttentionBackwardArgs)._replace(bias_grad=True)
    assert backward_args("dout", "dlse", tensors, options) == every
    plain = names(AttentionArgs)._replace(**NO_SCORES)
    saved = saved_for_backward(plain, "out", "lse", "rng_state")
    expected = every._replace(**NO_SCORES)
    assert (
        backward_args("dout", "dlse", *saved) == expected == AttentionBackwardArgs("dout", "dlse", *saved[0], *saved[1])
    )
    kinds = AttentionBackwardArgs.__annotations__
    assert all(kinds[name] in (int, float, bool) for name in options)
    assert not any(kinds[name] in (int, float, bool) for name in tensors)


def test_gradients_stand_at_their_arguments():
    values = ("dq", "dk", "dv", "dsinks", "dattn_bias", "drel_bias")
    given = dict(zip(AttentionArgs._fields, attention_gradients(values)))
    assert {name: x for name, x in given.items() if x is not None} == {
        "q": "dq",
        "k": "dk",
        "v": "dv",
        "sinks": "dsinks",
        "attn_bias": "dattn_bias",
        "rel_bias": "drel_bias",
    }
    assert tuple(given) == AttentionArgs._fields


@pytest.mark.parametrize("name", FORWARD_ONLY)
def test_arguments_without_backward_are_named(name):
    args = AttentionArgs(*(None,) * len(AttentionArgs._fields))
    assert args.forward_only() is None
    assert args._replace(**{name: 1}).forward_only() == name


def test_sizes_of_a_plan_are_all_but_its_tensors():
    sizes = names(KvCachePlanArgs).sizes()
    plain = [n for n in KvCachePlanArgs._fields if KvCachePlanArgs.__annotations__[n] in (int, bool)]
    assert [*sizes, "eight_bit", "sm_margin", "head_dim_v"] == plain  # by name


def numbered_positions(source):
    """Lines that take an argument by its number, or count arguments: args[9], inputs[1:4], (None,) * 21.

    The first of `inputs` is no argument of an operator but the first of (q, k, v), (q, kv) or (qkv,).
    """
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            index = node.slice
            ends = (index.lower, index.upper) if isinstance(index, ast.Slice) else (index,)
            counted = node.value.id in ("args", "inputs", "rest", "saved")
            if counted and any(isinstance(end, ast.Constant) and end.value not in (None, 0) for end in ends):
                lines.append(node.lineno)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and isinstance(node.left, ast.Tuple):
            if isinstance(node.right, ast.Constant):
                lines.append(node.lineno)
    return lines


def test_numbered_positions_are_found():
    assert numbered_positions("a = args[9]\nb = inputs[1:4]\nc = (None,) * 21\nd = args.q[0]\ne = args[name]") == [
        1,
        2,
        3,
    ]


@pytest.mark.parametrize("path", sorted((Path(flash_attn.__file__).parent / "ops").glob("*.py")), ids=lambda p: p.name)
def test_no_argument_is_known_by_its_number(path):
    assert numbered_positions(path.read_text(encoding="utf-8")) == []
