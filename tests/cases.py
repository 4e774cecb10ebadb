"""The one table of attention problems, shared by the tests and the benchmarks (no torch here).

``BENCH_CELLS`` are the 36 benchmark cells. ``pairwise_cases`` covers every pair of feature values with few
problems, ``full_cases`` is the whole product of a reduced set of values. ``BENCH_GROUPS`` is what the benchmarks
measure besides the cells: other head dims, GQA, windows, packed sequences, features, e4m3, launch-bound shapes.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import kernel_tables

HEAD_DIMS = (8, 16, 32, 40, 64, 72, 80, 96, 104, 128, 136, 160, 192, 200, 224, 256, 320, 512)
# Of pairwise cases on CPU tensors: its backend is one code for all head dims, and for all ratios of heads.
CPU_HEAD_DIMS = (8, 37, 64, 72, 136, 256, 512)
CPU_HEADS = ((1, 1), (2, 2), (3, 1), (8, 2), (5, 1))
CPU_LENGTHS = ((1, 1), (1, 257), (64, 65), (65, 129), (127, 128), (128, 300), (200, 73))
GQA_RATIOS = (1, 3, 4, 5, 7, 8, 12)
PAGE_SIZES = (1, 7, 16, 48, 256, 1000)
SEQLENS_Q = (0, 1, 63, 64, 65, 127, 128, 129, 1000)
# Fields that the public functions and the reference take too; window is window_size in the functions.
OPTIONS = ("causal", "window", "softcap")
DTYPES = {"cpu": ("float16", "bfloat16", "float32", "float64"), "cuda": ("float16", "bfloat16")}


@dataclass(frozen=True)
class Case:
    """One attention problem.

    ``kind`` says how sequences lie in memory: ``dense`` (batch, seqlen, ...), or concatenated rows: ``packed``
    (no gaps), ``padded`` (rows after the last sequence), ``seqused`` (fewer keys used than stored) and ``leftpad``
    (unused rows before the keys). ``page_size`` 0 means K/V are not paged. ``alibi``: ``none``, ``heads`` for
    slopes (nheads) or ``batch`` for slopes (batch, nheads). Window values below 0 are unbounded. ``seqlens`` states
    the lengths of packed sequences where they matter (benchmarks), of queries and keys alike. ``max_logit``, in
    benchmarks: the call returns the largest logits too. ``head_dim_v`` 0 means that v has the head dim of q and k.

    ``cache``, in benchmarks: the keys lie in a KV cache. ``append`` of them are new, rotated and written by the call;
    ``invariant`` asks for the batch-invariant mode. ``cache_dtype``: ``e4m3`` with a descale a tensor, ``int8`` with
    one for each token and head, or "" for the dtype of q.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    nheads: int
    nheads_k: int
    head_dim: int
    dtype: str
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: str = "none"
    sinks: bool = False
    max_logit: bool = False
    dropout: float = 0.0
    kind: str = "dense"
    page_size: int = 0
    seqlens: tuple[int, ...] = ()
    append: int = 0
    invariant: bool = False
    cache_dtype: str = ""
    head_dim_v: int = 0

    @property
    def value_dim(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def id(self) -> str:
        """Short unique text of the case, used as the pytest parameter name."""
        parts = [f"b{self.batch}", f"q{self.seqlen_q}", f"k{self.seqlen_k}", f"h{self.nheads}x{self.nheads_k}"]
        parts += [f"d{self.head_dim}" + f"x{self.head_dim_v}" * (self.head_dim_v > 0), self.dtype]
        parts += ["causal"] * self.causal
        parts += [f"w{self.window[0]}x{self.window[1]}"] * (self.window != (-1, -1))
        parts += [f"cap{self.softcap:g}"] * (self.softcap > 0)
        parts += [f"alibi_{self.alibi}"] * (self.alibi != "none")
        parts += ["sinks"] * self.sinks
        parts += ["maxlogit"] * self.max_logit
        parts += [f"p{self.dropout:g}"] * (self.dropout > 0)
        parts += [self.kind]
        parts += [f"page{self.page_size}"] * (self.page_size > 0)
        parts += [f"{len(self.seqlens)}seqs{sum(self.seqlens)}"] * (len(self.seqlens) > 0)
        parts += [f"append{self.append}"] * (self.append > 0)
        parts += ["invariant"] * self.invariant
        parts += [self.cache_dtype] * bool(self.cache_dtype)
        return "-".join(parts)

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward pass: 2 * b * h * sq * sk * (d + d_v), half of it when causal."""
        full = 2 * self.batch * self.nheads * self.seqlen_q * self.seqlen_k * (self.head_dim + self.value_dim)
        return full // 2 if self.causal else full


CELL_SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)


def bench_cells(head_dims=(64, 128, 256), dtype: str = "bfloat16") -> list[Case]:
    """Head dim x causal x seqlen 512..16384 with batch * seqlen = 16384 and heads * head_dim = 2048 (or just below)."""
    return [
        Case(16384 // s, s, s, 2048 // d, 2048 // d, d, dtype, causal=causal)
        for d in head_dims
        for causal in (False, True)
        for s in CELL_SEQLENS
    ]


# 16 sequences of 128 to 4096 tokens, 28788 in all.
VARLEN_SEQLENS = (2245, 3638, 623, 2455, 472, 128, 351, 1467, 1689, 1637, 4096, 1958, 370, 2039, 2228, 3392)


def bench_groups(dtype: str = "bfloat16") -> dict[str, list[Case]]:
    """The benchmark's problems besides the cells, by the group in which their score is reported."""
    longest = max(VARLEN_SEQLENS)
    features = ({}, {"softcap": 30.0}, {"alibi": "heads"}, {"dropout": 0.1}, {"sinks": True}, {"max_logit": True})
    return {
        "dims": bench_cells((96, 192), dtype),
        # The cells at one batch size and one number of heads: short sequences are little work, long ones much.
        "b4h8": [
            Case(4, s, s, 8, 8, d, dtype, causal)
            for d in (64, 128)
            for causal in (False, True)
            for s in (*CELL_SEQLENS, 32768)  # the last: 69 GB of scores, more than plain operations have memory for
        ],
        "gqa": [Case(b, s, s, 32, 8, 128, dtype, causal=True) for b, s in ((8, 2048), (2, 8192))],
        "window": [
            Case(2, 8192, 8192, 16, 16, 128, dtype, causal=True, window=(1024, -1)),
            Case(1, 16384, 16384, 16, 16, 128, dtype, causal=True, window=(4096, -1)),
        ],
        "varlen": [
            Case(16, longest, longest, 16, 16, 128, dtype, causal, kind="packed", seqlens=VARLEN_SEQLENS)
            for causal in (False, True)
        ],
        # Packed sequences of equal lengths, and the dense batch that is the same work.
        "varlen_equal": [
            Case(b, s, s, 16, 16, 128, dtype, causal, kind="packed" if packed else "dense", seqlens=(s,) * b * packed)
            for b, s in ((16, 1024), (4, 4096))
            for causal in (False, True)
            for packed in (False, True)
        ],
        # At head dim 128 every one; at others those with separate kernels, and the layers of a model with windows.
        "features": [
            *(
                Case(2, 8192, 8192, 16, 16, 128, dtype, causal, **feature)
                for causal in (False, True)
                for feature in features
            ),
            *(
                Case(2, 8192, 8192, 2048 // d, 2048 // d, d, dtype, causal=True, **feature)
                for d in (64, 256)
                for feature in ({"softcap": 50.0}, {"alibi": "heads"})
            ),
            *(
                Case(1, 16384, 16384, 2048 // d, 2048 // d, d, dtype, causal=True, window=(4096, -1), softcap=50.0)
                for d in (128, 256)
            ),
        ],
        "value_dim": [Case(4, 4096, 4096, 16, 16, 192, dtype, causal, head_dim_v=128) for causal in (False, True)],
        "deterministic": [
            *(case for case in bench_cells(dtype=dtype) if case.seqlen_q in (1024, 4096, 16384)),
            Case(2, 8192, 8192, 32, 8, 128, dtype, causal=True),
            Case(16, longest, longest, 16, 16, 128, dtype, True, kind="packed", seqlens=VARLEN_SEQLENS),
        ],
        # Of e4m3 and bf16 values of the same problem.
        "fp8": [
            Case(16384 // s, s, s, 2048 // d, 2048 // d // ratio, d, dtype, causal)
            for d, ratio in ((64, 1), (128, 1), (128, 4), (256, 1))
            for causal in (False, True)
            for s in CELL_SEQLENS
        ],
        "tangents": [
            Case(16384 // s, s, s, 2048 // d, 2048 // d, d, dtype) for d in (64, 128) for s in (2048, 4096, 8192, 16384)
        ],
        "small": small_cases(dtype),
        "one_wave": one_wave_cases(dtype),
    }


def small_cases(dtype: str) -> list[Case]:
    """Batch 1: fewer thread blocks than a GPU has multiprocessors, or so little work that launching dominates."""
    square = [(s, s, h, d, True) for d in (64, 128) for s, h in ((128, 4), (128, 16), (512, 4), (512, 16))]
    few_queries = [
        (1, 512, 16, 128, False),
        (1, 4096, 16, 128, False),
        (16, 2048, 8, 64, False),
        (64, 512, 2, 256, False),
    ]
    return [Case(1, sq, sk, h, h, d, dtype, causal=causal) for sq, sk, h, d, causal in square + few_queries]


def one_wave_cases(dtype: str) -> list[Case]:
    """Batch 1: about as many row blocks as a GPU has multiprocessors, or fewer and long ones."""
    shapes = [(512, 512, 32, True), (1024, 1024, 16, False), (1024, 1024, 16, True), (512, 2048, 16, False)]
    shapes += [(2048, 2048, 8, False), (2048, 2048, 8, True), (4096, 4096, 4, True), (1024, 1024, 20, False)]
    cases = [Case(1, sq, sk, h, h, d, dtype, causal=causal) for d in (64, 128) for sq, sk, h, causal in shapes]
    return cases + [Case(1, 1024, 1024, 16, 16, 256, dtype), Case(1, 2048, 2048, 8, 8, 256, dtype, causal=True)]


CACHE_SIZES = ((1, 8192), (1, 65536), (16, 4096), (64, 2048), (128, 8192))  # sequences, keys of each
CACHE_HEADS = ((32, 8), (16, 16), (64, 8))


def cache_groups(dtype: str = "bfloat16") -> dict[str, list[Case]]:
    """Attention over a KV cache, dense and paged: one query of each sequence, several, chunks of a prompt."""

    def case(size, heads=(32, 8), page_size=0, queries=1, head_dim=128, **options):
        options = {"causal": queries > 1, **options}
        return Case(size[0], queries, size[1], *heads, head_dim, dtype, kind="cache", page_size=page_size, **options)

    large = CACHE_SIZES[2:]
    return {
        "decode": [case(n, h, p) for h in CACHE_HEADS for n in CACHE_SIZES for p in (0, 16, 256)],
        "decode_layers": [case(n, h, p) for h in CACHE_HEADS[:2] for n in CACHE_SIZES for p in (0, 16)],
        "decode_eager": [case(n, page_size=p) for n in ((1, 1024), (64, 2048)) for p in (0, 16)],
        "decode_tokens": [case((16, 4096), page_size=p, queries=s) for s in (2, 4, 8, 16) for p in (0, 16)],
        "decode_append": [case(n, page_size=p, append=1) for n in large for p in (0, 16)],
        "decode_invariant": [case(n, page_size=p, invariant=True) for n in CACHE_SIZES for p in (0, 16)],
        "decode_8bit": [
            case(n, h, p, cache_dtype=stored)
            for stored in ("e4m3", "int8") for h in CACHE_HEADS[:2] for n in CACHE_SIZES for p in (0, 16)
        ],
        "decode_features": [
            case((64, 2048), (32, 32), head_dim=64),
            case((64, 2048), (16, 4), head_dim=256),
            case((64, 16384), window=(1023, 0)),
            case((64, 2048), softcap=30.0),
            case((64, 2048), alibi="heads"),
        ],
        "decode_mla": [
            case(n, (h, 1), 64, head_dim=64, head_dim_v=512)
            for h in (16, 64, 128) for n in (*CACHE_SIZES, (64, 4096), (128, 4096))
        ],
        "prefill_cache": [
            case(n, page_size=p, queries=s)
            for n, s in (((1, 8192), 512), ((1, 32768), 2048), ((8, 4096), 128))
            for p in (0, 16)
        ],
    }  # fmt: skip


def accuracy_cases(head_dims=kernel_tables.WGMMA, dtypes=("bfloat16", "float16")) -> list[tuple[str, Case]]:
    """Problems whose errors are compared with peers', with the name of their logits; the longest at the end.

    Logits: normal of a standard deviation ("std 3"), or one key above all others ("sink", "dominant"), or as they come.
    """

    def square(seqlen, **options):
        return {"batch": 1, "seqlen_q": seqlen, "seqlen_k": seqlen, **options}

    lengths, stds = (128, 1000, 2048, 300, 77), ("std 1", "std 3", "std 8")
    one_key = {"batch": 1, "seqlen_q": 339, "seqlen_k": 1}
    cache = {"batch": 4, "seqlen_q": 1, "seqlen_k": 8192, "nheads_k": 2, "kind": "cache"}
    grid = [(std, seqlen) for seqlen in (128, 1024, 4096) for std in stds]
    shapes = [(std, square(seqlen, causal=index % 2 == 1)) for index, (std, seqlen) in enumerate(grid)]
    for seqlen in (1024, 4096):
        shapes += [("sink", square(seqlen, causal=True)), ("dominant", square(seqlen))]
    shapes += [("one key", one_key), ("one key", {**one_key, "alibi": "heads"})]
    shapes += [("alibi", square(2048, causal=causal, alibi="heads")) for causal in (False, True)]
    for std in stds[1:]:
        packed = {**square(max(lengths), causal=True), "batch": len(lengths), "kind": "packed", "seqlens": lengths}
        others = (square(2048, causal=True, window=(256, -1)), packed, {"batch": 1, "seqlen_q": 64, "seqlen_k": 8192})
        shapes += [(std, fields) for fields in (*others, cache, {**cache, "page_size": 16})]
    shapes += [("std 1", square(512, dropout=0.1))]
    shapes += [("std 3", square(16384, causal=causal)) for causal in (False, True)]
    return [
        (logits, Case(**{"nheads": 4, "nheads_k": 4, **fields}, head_dim=head_dim, dtype=dtype))
        for logits, fields in shapes for dtype in dtypes for head_dim in head_dims
    ]  # fmt: skip


BENCH_CELLS = bench_cells()
BENCH_GROUPS = bench_groups()

# Every pair of values of two of these features occurs in some pairwise case.
FEATURES: dict[str, tuple] = {
    "head_dim": HEAD_DIMS + (37,),
    "lengths": ((1, 1), (1, 257), (63, 64), (64, 65), (65, 129), (127, 128), (128, 300), (129, 127), (200, 73)),
    "heads": ((1, 1), (2, 2), (3, 1), (8, 2), (5, 1), (7, 1), (8, 1), (12, 1)),
    "page_size": (0,) + PAGE_SIZES,
    "window": ((-1, -1), (0, 0), (17, -1), (-1, 5), (30, 40), (400, 2)),
    "kind": ("dense", "packed", "padded", "seqused", "leftpad"),
    "dtype": DTYPES["cpu"],
    "alibi": ("none", "heads", "batch"),
    "causal": (False, True),
    "softcap": (0.0, 15.0),
    "sinks": (False, True),
    "dropout": (0.0, 0.17),
}

FULL_FEATURES: dict[str, tuple] = {
    "head_dim": (64, 80, 256),
    "lengths": ((1, 257), (129, 127), (200, 300)),
    "heads": ((2, 2), (6, 2)),
    "page_size": (0, 7),
    "window": ((-1, -1), (17, -1), (30, 40)),
    "kind": ("dense", "packed", "leftpad"),
    "dtype": DTYPES["cuda"],
    "alibi": ("none", "batch"),
    "causal": (False, True),
    "softcap": (0.0, 15.0),
    "dropout": (0.0, 0.17),
}


# Head dims of q and k, and of v: every pair of values of two of these features occurs in some value_dim_cases() case.
VALUE_DIM_FEATURES: dict[str, tuple] = {
    "head_dims": (
        (192, 128),
        (128, 192),
        (64, 32),
        (40, 256),
        (256, 24),
        (100, 37),
        (37, 100),
        (8, 3),
        (1, 250),
        (64, 512),
        (512, 200),
    ),
    "lengths": ((20, 257), (65, 129), (129, 127), (128, 300), (200, 73)),
    "heads": ((2, 2), (8, 2), (5, 1)),
    "kind": ("dense", "packed", "padded", "seqused", "leftpad"),
    "page_size": (0, 7, 16),
    "window": ((-1, -1), (17, -1), (30, 40)),
    "dtype": DTYPES["cuda"],
    "alibi": ("none", "batch"),
    "causal": (False, True),
    "softcap": (0.0, 15.0),
    "sinks": (False, True),
    "dropout": (0.0, 0.17),
}


def _allowed(row: dict) -> bool:
    """Pages exist only for K/V of sequences that are addressed one by one."""
    return not (row.get("kind") == "dense" and row.get("page_size", 0) > 0)


def pairwise(features: dict[str, tuple], allowed=_allowed) -> list[dict]:
    """Rows that together hold every allowed pair of values of two features.

    Greedy and deterministic: each row starts from the first pair not yet covered; every other feature then takes
    the value that covers most uncovered pairs with the values already chosen (the least used one on a tie).
    """
    names = list(features)
    uncovered = {
        (a, x, b, y): None
        for a, b in itertools.combinations(names, 2)
        for x in features[a]
        for y in features[b]
        if allowed({a: x, b: y})
    }
    used = {(n, x): 0 for n in names for x in features[n]}
    order = {n: i for i, n in enumerate(names)}
    rows = []
    while uncovered:
        a, x, b, y = next(iter(uncovered))
        row = {a: x, b: y}
        for name in names:
            if name in row:
                continue
            candidates = [value for value in features[name] if allowed({**row, name: value})]

            def gain(value, name=name, row=row):
                pairs = ((o, w, name, value) if order[o] < order[name] else (name, value, o, w) for o, w in row.items())
                return sum(pair in uncovered for pair in pairs), -used[name, value]

            row[name] = max(candidates, key=gain)
        for (m, v), (n, w) in itertools.combinations(sorted(row.items(), key=lambda item: order[item[0]]), 2):
            uncovered.pop((m, v, n, w), None)
        for item in row.items():
            used[item] += 1
        rows.append(row)
    return rows


def _case(row: dict, batch: int = 3) -> Case:
    rest = {key: value for key, value in row.items() if key not in ("lengths", "heads", "head_dims")}
    (sq, sk), (h, h_k) = row["lengths"], row["heads"]
    if "head_dims" in row:
        rest["head_dim"], rest["head_dim_v"] = row["head_dims"]
    return Case(batch=batch, seqlen_q=sq, seqlen_k=sk, nheads=h, nheads_k=h_k, **rest)


def features_of(device: str) -> dict[str, tuple]:
    """FEATURES with the dtypes of a device, by whichever path of calls; fewer values of sizes on the CPU."""
    on_cpu = {"head_dim": CPU_HEAD_DIMS, "heads": CPU_HEADS, "lengths": CPU_LENGTHS} if device == "cpu" else {}
    return {**FEATURES, "dtype": DTYPES["cpu" if device == "cpu" else "cuda"], **on_cpu}


def pairwise_cases(device: str) -> list[Case]:
    """Cases that hold every pair of feature values, for ``cpu`` or ``cuda``."""
    return [_case(row) for row in pairwise(features_of(device))]


def value_dim_cases(training=False) -> list[Case]:
    """Pairwise combinations where v has another head dim than q and k. training: of what has a backward."""
    features = VALUE_DIM_FEATURES
    if training:
        features = {key: values for key, values in features.items() if key != "page_size"}
        features["kind"] = ("dense", "packed", "padded")
    return [_case(row) for row in pairwise(features)]


def full_cases() -> list[Case]:
    """The whole product of FULL_FEATURES."""
    rows = (dict(zip(FULL_FEATURES, values)) for values in itertools.product(*FULL_FEATURES.values()))
    return [_case(row) for row in rows if _allowed(row)]


def has_yardstick(row):
    """False where every row sees one key at most: plain attention's dq and dk are exactly 0 then, or with sinks better
    than rowsum(dout * out) can be, also in half precision. test_backward.py::test_single_key has the bound that holds.
    """
    single = row.get("window") == (0, 0) or row.get("lengths") == (1, 1)
    perturbed = row.get("dropout", 0) > 0 or row.get("sinks", False)
    return not (single and perturbed and row.get("dtype") in ("float16", "bfloat16"))


def training_cases(device: str) -> list[Case]:
    """Pairwise combinations of what has a backward: no key padding, no pages."""
    features = {key: values for key, values in features_of(device).items() if key != "page_size"}
    features["kind"] = ("dense", "packed", "padded")
    return [_case(row) for row in pairwise(features, lambda row: has_yardstick({"dtype": "float16", **row}))]
