"""The table of docs/fp8.md that compares how P V is computed: a model of the arithmetic, not of the time.

    python benchmarks/fp8_accuracy.py

Scores are exact, V is e4m3, and the reference is float64 attention of both: what remains is the error of P and of the
sums. The e4m3 tensor cores of Hopper are modelled bit by bit: a step of 32 products and the accumulator are aligned to
the largest exponent among them and cut to 13 fraction bits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

BLOCK, STEP, FRACTION_BITS = 128, 32, 13
LARGEST = 448.0  # e4m3


class Inputs(NamedTuple):
    name: str
    keys: int
    std: float = 1.0  # of the logits
    v_mean: float = 0.0
    sink: float = 0.0  # how far four keys with small values stand above the others


class Form(NamedTuple):
    """How P and its sums are made. `offset`: log2 of P where the score is its reference."""

    name: str
    offset: float
    lag: float | None  # how far a maximum may exceed the reference, which is then an integer; None: it is the maximum
    flush: int | None  # blocks that the tensor core adds up before fp32 does; None: all
    rounded_sums: bool = False  # the denominator is that of P as it was rounded, by the tensor core
    linear: bool = False  # codes straight from the scores


ROWS = (
    Inputs("V with mean 0", 16384),
    Inputs("V with mean 0.5", 4096, v_mean=0.5),
    Inputs("V with mean 0.5", 16384, v_mean=0.5),
    Inputs("V with mean 0.5", 131072, v_mean=0.5),
    Inputs("V with mean 0.5, logits of standard deviation 3", 16384, std=3.0, v_mean=0.5),
    Inputs("V with mean 0.5, a sink of 12 nats", 16384, v_mean=0.5, sink=12.0),
)
FORMS = (
    Form("e4m3 P", 5.0, 3.0, 1, rounded_sums=True),
    Form('`exp="fast"`', 5.0, 3.0, 1, rounded_sums=True, linear=True),
    Form("FA3-style FP8 without flush", 8.0, None, None),
)
COLUMNS = ("bf16 P", *(form.name for form in FORMS))


def to_e4m3(x):
    """The nearest values of e4m3, ties to even; beyond the largest it saturates."""
    magnitude = np.minimum(np.abs(x), LARGEST)
    _, exponent = np.frexp(magnitude)
    unit = np.ldexp(1.0, np.maximum(exponent - 1, -6) - 3)
    return np.copysign(np.rint(magnitude / unit) * unit, x)


def to_bf16(x):
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)


def linear_e4m3(octaves):
    """Codes are linear in their value between powers of two: 8 of them for each octave, from 2^-7 on."""
    code = np.clip(np.rint(8 * (octaves + 7)), 0, 126).astype(np.int64)
    mantissa, exponent = code & 7, code >> 3
    return np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(1 + mantissa / 8, exponent - 7))


def add_on_tensor_core(total, p, v):
    """total (rows, columns) plus p (rows, STEP) times v (STEP, columns), in one step of the tensor core."""
    products = p[:, :, None] * v[None]
    largest = np.maximum(np.abs(products).max(1), np.abs(total))
    _, exponent = np.frexp(largest)
    unit = np.ldexp(1.0, exponent - 1 - FRACTION_BITS)
    return (np.trunc(products / unit[:, None]).sum(1) + np.trunc(total / unit)) * unit


def to_float(x):
    return x.astype(np.float32).astype(np.float64)


def attend(form: Form, scores, v):
    """Keys from the last block down to the first, as the kernels of e4m3 walk them. scores in powers of two."""
    rows, keys = scores.shape
    columns = np.concatenate([v, np.ones((keys, 1))], 1)  # the last one adds up P
    out, partial = np.zeros((rows, columns.shape[1])), np.zeros((rows, columns.shape[1]))
    reference, sums = np.full(rows, -math.inf), np.zeros(rows)
    blocks = 0
    for begin in range(keys - BLOCK, -1, -BLOCK):
        block = scores[:, begin : begin + BLOCK]
        largest = block.max(1)
        if form.lag is None:
            raised = np.maximum(reference, largest)
        else:
            rises = np.isinf(reference) | (largest > reference + form.lag).any()
            raised = np.where(rises, np.maximum(reference, np.rint(largest)), reference)
        correction = np.where(np.isinf(reference), 0.0, np.exp2(reference - raised))
        reference = raised
        if form.flush is not None and (blocks == form.flush or (correction != 1.0).any()):
            out, partial, blocks = to_float(out + partial), np.zeros_like(partial), 0
        out, partial, sums = out * correction[:, None], partial * correction[:, None], sums * correction
        octaves = block - reference[:, None] + form.offset
        p = linear_e4m3(octaves) if form.linear else to_e4m3(np.exp2(octaves))
        sums += np.exp2(octaves).sum(1)
        for key in range(0, BLOCK, STEP):
            step = slice(begin + key, begin + key + STEP)
            partial = add_on_tensor_core(partial, p[:, key : key + STEP], columns[step])
        blocks += 1
    out = to_float(out + partial)
    return out[:, :-1] / (out[:, -1] if form.rounded_sums else sums)[:, None]


def relative_rmse(ours, expected):
    return math.sqrt(np.square(ours - expected).mean() / np.square(expected).mean())


def errors(inputs: Inputs, rows=16, columns=32):
    """{column: relative RMSE} of one line of the table."""
    rng = np.random.default_rng(inputs.keys)
    scores = rng.standard_normal((rows, inputs.keys)) * inputs.std
    v = rng.standard_normal((inputs.keys, columns)) + inputs.v_mean
    if inputs.sink > 0:
        scores[:, :4] += inputs.sink
        v[:4] *= 0.02
    v = to_e4m3(v)
    scores *= math.log2(math.e)
    p = np.exp2(scores - scores.max(1, keepdims=True))
    sums = p.sum(1, keepdims=True)
    expected = p @ v / sums
    of_forms = {form.name: relative_rmse(attend(form, scores, v), expected) for form in FORMS}
    return {COLUMNS[0]: relative_rmse(to_bf16(p) @ v / sums, expected), **of_forms}


def shown(error):
    mantissa, exponent = f"{error:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def line(inputs: Inputs, found):
    return f"| {inputs.name} | {inputs.keys} | " + " | ".join(shown(found[name]) for name in COLUMNS) + " |"


def heading():
    return f"| inputs | keys | {' | '.join(COLUMNS)} |\n|---|---|{'---|' * len(COLUMNS)}"


if __name__ == "__main__":
    print(heading())
    for inputs in ROWS:
        print(line(inputs, errors(inputs)), flush=True)
