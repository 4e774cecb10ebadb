"""AttentionMask: every constructor against the mask that its words define, score by score."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree

from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn.masks import AttentionMask, MaskFactors
from flash_attn.masks.arguments import check_bias, mask_factors, with_all_axes
from flash_attn.masks.checks import check_factors
from flash_attn.masks.factors import pack_bits, unpack_bits

INT_MAX = 2**31 - 1


def ints(*values, device="cpu", dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=device)


def brute_force(device, *sizes, sees):
    """Bool of these sizes from sees(*index)."""
    result = torch.zeros(sizes, dtype=torch.bool)
    for index in torch.cartesian_prod(*(torch.arange(n) for n in sizes)).tolist():
        result[tuple(index)] = bool(sees(*index))
    return result.to(device)


def assert_mask(mask, expected):
    """The mask is expected, bool broadcastable to (b, h, sq, sk)."""
    dense = mask.to_dense(*expected.shape[-2:])
    assert torch.equal(*torch.broadcast_tensors(dense, expected))


def test_documents(device):
    cu = ints(1, 3, 3, 8, device=device)
    mask = AttentionMask.documents(cu, 10)
    of = [None, 0, 0, 2, 2, 2, 2, 2, None, None]
    expected = brute_force(device, 10, 10, sees=lambda i, j: of[i] is not None and of[i] == of[j])
    assert_mask(mask, expected)
    ids = ints(4, 4, 2, 2, 2, 4, 4, device=device)
    runs = [0, 0, 1, 1, 1, 2, 2]
    small = AttentionMask.documents(ints(0, 250, device=device, dtype=torch.uint8), 300).to_dense()
    assert small[0, 0, :250, :250].all() and small.sum() == 250 * 250
    assert_mask(AttentionMask.document_ids(ids), brute_force(device, 7, 7, sees=lambda i, j: runs[i] == runs[j]))
    batch = AttentionMask.documents(torch.stack([cu, ints(0, 9, 4, 10, device=device)]), 10)  # falls: as 0, 9, 9, 10
    other = brute_force(device, 10, 10, sees=lambda i, j: (i < 9) == (j < 9))
    assert_mask(batch, torch.stack([expected, other])[:, None])


@pytest.mark.parametrize("sq,sk", ((5, 5), (4, 7), (7, 4)))
def test_prefix_lm(device, sq, sk):
    prefix = ints(0, 3, 50, device=device)
    mask = AttentionMask.prefix_lm(prefix, sq, sk)
    sees = lambda b, h, i, j: j <= i + sk - sq or j < (0, 3, 50)[b]  # noqa: E731
    expected = brute_force(device, 3, 1, sq, sk, sees=sees)
    assert_mask(mask, expected)
    cu_q, cu_k = (torch.arange(4, dtype=torch.int32, device=device) * n for n in (sq, sk))
    packed = AttentionMask.prefix_lm(prefix, 3 * sq, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    for b in range(3):
        assert_mask(packed.sequence(b * sq, b * sq + sq, b * sk, b * sk + sk), expected[b])


TREE = {"node": [0, 0, 1, 1, 2, 2, 3, 4], "parent": [None, 0, 1, 1, 0]}  # node 1 has the leaves 2 and 3


def ancestors(node):
    return set() if node is None else {node} | ancestors(TREE["parent"][node])


@pytest.mark.parametrize("causal", (False, True))
def test_prefix_tree(device, causal):
    node = TREE["node"]
    tin, tout = (ints(*(t[n] for n in node), device=device) for t in ((0, 1, 2, 3, 4), (5, 4, 3, 4, 5)))
    sees = lambda i, j: node[j] in ancestors(node[i]) and (j <= i or not causal)  # noqa: E731
    expected = brute_force(device, 8, 8, sees=sees)
    assert_mask(AttentionMask.prefix_tree(tin, tout, causal), expected)
    cu, tout = ints(0, 8, 8, 12, device=device), tout.long().where(tout < 5, 2**63 - 1)  # without an end
    packed = AttentionMask.prefix_tree(torch.cat([tin, tin[:4]]), torch.cat([tout, tout[:4]]), causal, cu_seqlens=cu)
    assert_mask(packed.sequence(0, 8, 0, 8), expected)
    assert_mask(packed.sequence(8, 12, 8, 12), expected[:4, :4])


def test_tree_of_fake_tensors():
    with FakeTensorMode():
        assert AttentionMask.prefix_tree(torch.arange(4), torch.arange(4) + 1).to_dense().shape == (1, 1, 4, 4)


def test_packed_tree_with_padding(device):
    """Rows before the first sequence and after the last one may hold anything."""
    tin, tout = (ints(*(t[n] for n in TREE["node"]), device=device) for t in ((0, 1, 2, 3, 4), (5, 4, 3, 4, 5)))
    padding = ints(9, 0, 3, device=device)
    tin, tout = (torch.cat([padding, x, padding.flip(0)]) for x in (tin, tout))
    packed = AttentionMask.prefix_tree(tin, tout, False, cu_seqlens=ints(3, 11, device=device))
    sees = lambda i, j: TREE["node"][j] in ancestors(TREE["node"][i])  # noqa: E731
    assert_mask(packed.sequence(3, 11, 3, 11), brute_force(device, 8, 8, sees=sees))


def test_packed_rows_without_sequences(device):
    cu, node, q = ints(0, device=device), ints(3, 1, 2, device=device), torch.randn(3, 1, 64, device=device).half()
    bounds = torch.zeros(1, 3, 2, dtype=torch.int32, device=device)
    masks = (
        AttentionMask.prefix_tree(node, node, cu_seqlens=cu),
        AttentionMask.prefix_lm(node[:0], 3, cu_seqlens_q=cu, cu_seqlens_k=cu),
        AttentionMask.from_startend_row_indices(bounds, True, cu_seqlens_q=cu, cu_seqlens_k=cu),
    )
    for mask in masks:
        assert not flash_attn_varlen_func(q, q, q, cu, cu, 0, 0, mask=mask).any()


def test_compiled_with_a_default_device(device):
    q, mask = torch.randn(1, 9, 1, 64, device=device).half(), torch.rand(9, 9, device=device) < 0.6
    with torch.device(device):
        compiled = torch.compile(lambda: flash_attn_func(q, q, q, mask=mask), fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(), flash_attn_func(q, q, q, mask=mask))


def test_query_ranges(device):
    """Negative and far bounds, inverted ranges, two of them, long ints."""
    lo = ints(-5, 3, 2**40, 4, device=device, dtype=torch.int64)
    hi = ints(2, 3, 2**41, 1, device=device, dtype=torch.int64)
    ranges = [(0, 2), None, None, None]
    sees = lambda i, j: ranges[i] is not None and ranges[i][0] <= j < ranges[i][1]  # noqa: E731
    expected = brute_force(device, 4, 6, sees=sees)
    assert_mask(AttentionMask.query_ranges(lo, hi), expected)
    two = AttentionMask.query_ranges(lo, hi, lo - lo + 4, hi - hi + INT_MAX)
    assert_mask(two, expected | (torch.arange(6, device=device) >= 4))
    by_head = AttentionMask.query_ranges(lo.expand(2, 3, 4), hi.expand(2, 3, 4))
    assert list(by_head.factors.query_ranges.shape) == [2, 3, 4, 2]
    assert_mask(by_head, expected)


@pytest.mark.parametrize("sq,sk", ((6, 6), (4, 6)))
@pytest.mark.parametrize("causal,n", ((True, 1), (True, 2), (False, 2), (False, 4)))
def test_startend_row_indices(device, causal, n, sq, sk):
    t = torch.randint(-1, sq + 3, (2, 3, sk, n), device=device, dtype=torch.int32)
    values = t.tolist()

    def sees(b, h, i, j):
        v = values[b][h][j]
        hidden = {
            (True, 1): lambda: i >= v[0],
            (True, 2): lambda: v[0] <= i < v[1],
            (False, 2): lambda: i >= v[0] or i < v[1],
            (False, 4): lambda: v[0] <= i < v[1] or v[2] <= i < v[3],
        }[causal, n]()
        return not hidden and not (causal and j > i + sk - sq)

    expected = brute_force(device, 2, 3, sq, sk, sees=sees)
    assert_mask(AttentionMask.from_startend_row_indices(t, causal, sq), expected)
    cu_q, cu_k = (torch.arange(3, dtype=torch.int32, device=device) * size for size in (sq, sk))
    packed = AttentionMask.from_startend_row_indices(
        t.transpose(0, 1).flatten(1, 2), causal, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k
    )
    assert_mask(packed.sequence(sq, 2 * sq, sk, 2 * sk), expected[1:])


def test_block_lists(device):
    """Unsorted, listed twice, in both lists, indices of no block; the rest of a list is not read."""
    cnt, full_cnt = ints([[2, 0, 3]], device=device), ints([[1, 1, 0]], device=device)
    idx = ints([[[2, 0, 1], [1, 1, 1], [1, 1, 9]]], device=device)
    full_idx = ints([[[0, 5], [-1, 0], [0, 0]]], device=device)
    mask = AttentionMask.from_block_lists(cnt, idx, full_cnt, full_idx, (2, 4), seqlen_q=5, seqlen_k=11)
    blocks = [{0, 2}, set(), {1}]
    assert_mask(mask, brute_force(device, 5, 11, sees=lambda i, j: j // 4 in blocks[i // 2]))


@pytest.mark.parametrize("block", (32, 20))
def test_block_mask_and_function(device, block):
    flex = pytest.importorskip("torch.nn.attention.flex_attention", reason="this torch has no FlexAttention")
    offsets = ints(3, 9, device=device)

    def mask_mod(b, h, q, k):
        return (k <= q) & (q - k < offsets[b] + 20 * h)

    expected = brute_force(device, 2, 2, 70, 90, sees=lambda b, h, i, j: j <= i and i - j < (3, 9)[b] + 20 * h)
    made = flex.create_block_mask(mask_mod, 2, 2, 70, 90, device=device, BLOCK_SIZE=block)
    mask = AttentionMask.from_block_mask(made)
    assert_mask(mask, expected)
    assert (mask.factors.block_map == 0).any() and (mask.factors.block_map == 1).any()
    assert_mask(AttentionMask.from_function(mask_mod, 2, 2, 70, 90, device), expected)
    whole = flex.create_block_mask(lambda b, h, q, k: k < 64, None, None, 64, 90, device=device, BLOCK_SIZE=32)
    assert_mask(AttentionMask.from_block_mask(whole), brute_force(device, 64, 90, sees=lambda i, j: j < 64))


def test_ranges(device):
    """Slices of the four kinds, that touch, that overlap, and two apart."""
    slices = [((0, 4), (0, 4), 1), ((0, 4), (6, 9), 0), ((4, 8), (2, 6), 2), ((4, 8), (4, 8), 1), ((9, 12), (0, 7), 3)]

    def sees(i, j):
        for (q0, q1), (k0, k1), kind in slices:
            end, begin = k1 - (q1 - 1 - i) * (kind % 2), k0 + (i - q0) * (kind // 2)
            if q0 <= i < q1 and begin <= j < end:
                return True
        return False

    expected = brute_force(device, 13, 10, sees=sees)
    lists = [list(x) for x in zip(*slices)]
    assert_mask(AttentionMask.from_ranges(*lists, seqlen_q=13, device=device), expected)
    tensors = [torch.tensor(x, device=device) for x in lists]
    mask = AttentionMask.from_ranges(*tensors, seqlen_q=13)
    assert mask.device.type == device and mask.factors.query_ranges.shape[-1] == 4
    assert_mask(mask, expected)
    with pytest.raises(RuntimeError, match=r"^q_ranges: expected at most 2 ranges .*, got 3 for query 5$"):
        AttentionMask.from_ranges([(0, 9), (5, 6), (4, 6)], [(0, 1), (4, 6), (8, 9)], [0, 0, 0])
    assert not AttentionMask.from_ranges([], [], [], 3, 3).to_dense().any()


def test_tensors_that_broadcast(device):
    """Bits only where the mask depends on queries and keys; no axis that broadcasts is stored."""
    full = torch.rand(2, 3, 5, 40, device=device) > 0.5
    kinds = {
        "bits": [full, full[0], full[0, 0], full[:, :1].expand(2, 3, 5, 40), full[:1]],
        "key_hidden": [full[:, :, :1], full[:, :1, :1], full[0, 0, :1], full[0, 0, 0],
                       full[:, :, :1].expand(-1, -1, 5, -1)],
        "query_ranges": [full[..., :1], full[:, :1, :, :1], full[..., :1].expand(-1, -1, -1, 40)],
    }  # fmt: skip
    for factor, tensors in kinds.items():
        for x in tensors:
            mask = AttentionMask.from_tensor(x)
            assert list(mask.factors.tensors()) == [factor]
            dense = mask.to_dense(5, 40)
            assert torch.equal(dense.expand(2, 3, 5, 40), x.expand(2, 3, 5, 40))
            assert dense[:, 0, 0, 0].numel() == (1 if x.dim() < 4 else len(x))
    one = AttentionMask.from_tensor(full[:, :1, :1, :1], seqlen_q=5)
    assert torch.equal(one.to_dense(5, 40).expand(2, 3, 5, 40), full[:, :1, :1, :1].expand(2, 3, 5, 40))
    assert_mask(AttentionMask.key_padding(full[:, 0, 0]), full[:, :1, :1].expand(2, 1, 5, 40))
    packed = AttentionMask.from_tensor(full[0], packed=True)
    assert_mask(packed.sequence(2, 5, 0, 33), full[0, :, 2:, :33])


def random_masks(device, sq, sk):
    """A mask of every kind, of one or several batch entries and heads (of 6)."""
    lo, hi = torch.randint(-2, sk, (4, 2, 3, sq), device=device), torch.randint(0, sk + 9, (4, 2, 3, sq), device=device)
    table = torch.randint(0, sq, (2, 2, sk, 4), device=device)
    cnt, idx = torch.randint(0, 3, (1, 2, 4), device=device), torch.randint(0, 6, (1, 2, 4, 3), device=device)
    blocks = AttentionMask.from_block_lists(cnt, idx, block_size=(8, 16), seqlen_q=sq, seqlen_k=sk)
    return {
        "range": AttentionMask.query_ranges(lo[0], hi[0])._with_keys(sk),
        "ranges": AttentionMask.query_ranges(lo[0, 0, 0], hi[0, 0, 0], lo[1, 0, 0], hi[1, 0, 0])._with_keys(sk),
        "keys": AttentionMask.key_padding(torch.rand(2, sk, device=device) > 0.2),
        "startend": AttentionMask.from_startend_row_indices(table, False, sq),
        "blocks": blocks,
        "block_mask": blocks & AttentionMask.from_function(lambda b, h, q, k: k <= q + 32, 1, 1, sq, sk, device),
        "bits": AttentionMask.from_tensor(torch.rand(2, 3, sq, sk, device=device) > 0.3),
    }  # fmt: skip


def expanded(mask, heads=6):
    dense = mask.to_dense(30, 80)
    return dense.repeat_interleave(heads // dense.shape[1], 1).expand(2, heads, -1, -1)


def test_conjunctions(device):
    """Each two kinds: by their own factors where these hold both, else by bits."""
    masks, others = random_masks(device, 30, 80), random_masks(device, 30, 80)
    for name, a in masks.items():
        for other, b in others.items():
            both = a & b
            assert torch.equal(expanded(both), expanded(a) & expanded(b)), (name, other)
            has_bits = both.factors.bits is not None
            needs_bits = {name, other} & {"bits", "block_mask"} or (name, other) in (
                ("ranges", "ranges"), ("keys", "startend"), ("startend", "keys"), ("startend", "startend"),
            )  # fmt: skip
            assert has_bits == bool(needs_bits), (name, other)
    other_size = AttentionMask.from_block_lists(
        torch.full((1, 1, 3), 2, device=device), ints([[[[0, 3]] * 3]], device=device)[0], block_size=(10, 20),
        seqlen_q=30, seqlen_k=80,
    )  # fmt: skip
    for name in ("blocks", "block_mask"):
        assert torch.equal(expanded(masks[name] & other_size), expanded(masks[name]) & expanded(other_size))
    packed = AttentionMask.query_ranges(*torch.zeros(4, 9, dtype=torch.int32, device=device), packed=True)
    with pytest.raises(RuntimeError, match="^mask: expected a combination that packed ranges hold"):
        packed & packed
    with pytest.raises(RuntimeError, match="^mask: expected one seqlen_k of both masks, got 80, 70"):
        masks["keys"] & AttentionMask.key_padding(torch.ones(70, dtype=torch.bool, device=device))


@pytest.mark.parametrize("batch", (0, 2))
def test_conjunctions_of_one_and_several_sequences(device, batch):
    for make in (
        lambda n: AttentionMask.from_tensor(torch.rand(n, 1, 3, 5, device=device) < 0.6, 3),
        lambda n: AttentionMask.query_ranges(*torch.ones(2, n, 1, 3, dtype=torch.int32, device=device)),
    ):
        assert (make(1) & make(batch)).to_dense(3, 5).shape[0] == batch


def test_a_mask_knows_of_changes(device):
    lo, hi = ints(0, 0, 1, device=device), ints(1, 2, 3, device=device)
    mask = AttentionMask.query_ranges(lo, hi)
    state = mask.state
    assert mask.state == state
    mask.factors.query_ranges[..., 0] += 1
    assert mask.state != state and mask.to_dense(3, 3).sum() == 2


def test_a_mask_is_a_pytree(device):
    masks = random_masks(device, 30, 80)
    for mask in masks.values():
        check_factors(mask.factors, 2, 6, 30, 80, torch.device(mask.device))
        tensors, spec = _pytree.tree_flatten(mask)
        again = _pytree.tree_unflatten(tensors, spec)
        assert len(tensors) == len(mask.factors.tensors()) and torch.equal(expanded(again), expanded(mask))
        assert all(a is b for a, b in zip(again.factors.tensors().values(), tensors))
        assert mask.to(device) is mask
    function = torch.compile(lambda mask: (mask & masks["range"]).factors.query_ranges, fullgraph=True, backend="eager")
    assert torch.equal(function(masks["ranges"]), (masks["ranges"] & masks["range"]).factors.query_ranges)


REJECTED = {
    "lo: expected an integer dtype, got float32": lambda: AttentionMask.query_ranges(torch.ones(3), ints(1, 2, 3)),
    "hi: expected the shape of lo [3], got [2]": lambda: AttentionMask.query_ranges(ints(1, 2, 3), ints(1, 2)),
    "hi2: expected a second range of lo2 and hi2, got one of both": lambda: AttentionMask.query_ranges(
        ints(1), ints(1), ints(1)
    ),
    "mask: expected dtype bool, got float32": lambda: AttentionMask.from_tensor(torch.ones(3, 3)),
    "seqlen_q: expected an int, got None": lambda: AttentionMask.from_tensor(torch.ones(2, 1, 1, 1).bool()),
    "tin: expected depth-first order (values that do not decrease), got smaller ones later": lambda: (
        AttentionMask.prefix_tree(ints(0, 2, 1), ints(3, 3, 3))
    ),
    "startend_row_indices: expected 2 or 4 values for each key with causal=False, got shape [1, 1, 3, 1]": lambda: (
        AttentionMask.from_startend_row_indices(torch.zeros(1, 1, 3, 1, dtype=torch.int32), False)
    ),
    "attn_type_map: expected values from 0 to 3, got [4]": lambda: AttentionMask.from_ranges([(0, 1)], [(0, 1)], [4]),
    "q_ranges: expected shape [3, 2], got [2, 3]": lambda: AttentionMask.from_ranges(
        torch.ones(2, 3).int(), torch.ones(3, 2).int(), [0, 0, 0]
    ),
    "k_ranges: expected an integer dtype, got float32": lambda: AttentionMask.from_ranges([(0, 1)], [(0.5, 1.5)], [0]),
    "block_size: expected two positive ints (queries, keys), got (2.0, 2)": lambda: AttentionMask.from_block_lists(
        torch.ones(1, 1, 2).int(), torch.ones(1, 1, 2, 1).int(), block_size=(2.0, 2), seqlen_q=4, seqlen_k=4
    ),
    "mask_mod: expected a bool tensor from it, got int64": lambda: AttentionMask.from_function(
        lambda b, h, i, j: i - j, None, None, 3, 3
    ),
    "idx: expected shape [1, 1, 2, 'most'], got [1, 1, 3, 1]": lambda: AttentionMask.from_block_lists(
        torch.ones(1, 1, 2).int(), torch.ones(1, 1, 3, 1).int(), block_size=(2, 2), seqlen_q=4, seqlen_k=4
    ),
    "prefix: expected shape [2], got [1]": lambda: AttentionMask.prefix_lm(ints(1), 5, cu_seqlens_q=ints(0, 2, 5)),
    "cu_seqlens_q: expected the shape of cu_seqlens_k [3], got [2]": lambda: AttentionMask.from_startend_row_indices(
        torch.zeros(1, 5, 1).int(), True, cu_seqlens_k=ints(0, 2, 5), cu_seqlens_q=ints(0, 2)
    ),
    "mask: expected masks of one batch, got sizes [2, 3]": lambda: (
        AttentionMask.from_tensor(torch.ones(2, 1, 3, 3).bool(), 3)
        & AttentionMask.from_tensor(torch.ones(3, 1, 3, 3).bool(), 3)
    ),
    "cu_seqlens: expected a Tensor, got list": lambda: AttentionMask.documents([0, 3], 3),
    "factors: expected at least one tensor, got none": lambda: AttentionMask(MaskFactors()),
}


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("message", REJECTED)
def test_errors(device, message):
    with pytest.raises((RuntimeError, TypeError)) as caught:
        REJECTED[message]()
    assert str(caught.value) == message


def test_arguments_of_calls(device):
    """Bool tensors are masks; a bias gets all axes, and its expanded ones give one gradient."""
    mask = AttentionMask.key_padding(torch.rand(2, 9, device=device) > 0.5)
    assert mask_factors(mask) is mask.factors and mask_factors(None) is None
    seen = torch.rand(5, 9, device=device) > 0.5
    assert torch.equal(AttentionMask(mask_factors(seen)).to_dense(5, 9)[0, 0], seen)
    assert mask_factors(seen[:1, :1], seqlen_q=5).query_ranges.shape == (1, 1, 5, 2)
    assert mask_factors(seen[None], packed=True).bits.shape == (1, 5, 1)
    bias = seen.float()
    assert with_all_axes(bias, packed=False).shape == (1, 1, 5, 9)
    assert with_all_axes(bias, packed=True).shape == (1, 5, 9)
    with pytest.raises(RuntimeError, match="^mask: expected an AttentionMask or dtype bool; .* got dtype float32$"):
        mask_factors(seen.float())
    with pytest.raises(RuntimeError, match="^attn_bias: expected numbers .* got dtype bool$"):
        check_bias(seen)
    with pytest.raises(TypeError, match="^mask: expected an AttentionMask or a bool Tensor, got MaskFactors$"):
        mask_factors(mask.factors)


@pytest.mark.devices("cuda")
def test_constructors_do_not_wait(device):
    """But those whose words say so."""
    cu, ids = ints(0, 3, 30, device=device), torch.randint(0, 3, (30,), device=device)
    t = torch.randint(0, 30, (1, 1, 30, 1), device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        AttentionMask.documents(cu, 30) & AttentionMask.document_ids(ids)
        AttentionMask.prefix_lm(cu[1], 30) & AttentionMask.prefix_tree(ids.sort().values, ids + 3)
        AttentionMask.from_startend_row_indices(t, True) & AttentionMask.from_tensor(ids[:, None] > ids)
        AttentionMask.from_block_lists(ids[None, None, :4], t[:, :, :4], block_size=(8, 8), seqlen_q=30, seqlen_k=30)
        AttentionMask.from_function(lambda b, h, q, k: k <= q, None, None, 30, 30, device)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_factors_are_strided():
    cu = torch.tensor([0, 4])
    for x, layout in ((cu.to_sparse(), "sparse_coo"), (torch.nested.nested_tensor([cu, cu]), "nested")):
        with pytest.raises(TypeError, match=f"^cu_seqlens: expected a strided Tensor, got a {layout} one$"):
            AttentionMask.documents(x, 4)


def test_packed_bits(device):
    """Of any widths, strides and bytes: memory of others may hold bools that are neither 0 nor 1."""
    for shape in ((5, 64), (3, 7, 96), (2, 33), (4, 1), (2, 1, 3, 100), (3, 0), (0, 32), (32,)):
        seen = torch.rand(shape, device=device) > 0.5
        words = pack_bits(seen)
        assert words.dtype == torch.int32 and words.shape == (*shape[:-1], -(-shape[-1] // 32))
        assert torch.equal(unpack_bits(words)[..., : shape[-1]], seen)
    wide = torch.rand(6, 200, device=device) > 0.5
    for seen in (wide[:, 3:131], wide[::2, ::2], wide.t(), wide[:, 16:144][1:4], wide[:1].expand(5, 200)):
        assert torch.equal(unpack_bits(pack_bits(seen))[..., : seen.shape[-1]], seen)
    odd = torch.randint(0, 4, (9, 128), device=device, dtype=torch.uint8)
    assert torch.equal(unpack_bits(pack_bits(odd.view(torch.bool))), odd != 0)
