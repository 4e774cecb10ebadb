# pip install '.[examples]'
"""What a whole model gains: training steps and requests of transformers' Llama, by PyTorch's SDPA and by these kernels.

    python examples/gains.py [--device cuda] [--out FILE.json]      about a minute on an H200; on a CPU in miniature

The model has the sizes of Llama 3.2 1B with a smaller vocabulary, and random weights. The ways take turns, call by
call: "torch" is attn_implementation="sdpa" as it is, "use" the same within `flash_attn.sdpa.use`, "fa_native" the
attention that `flash_attn.integrations.transformers` registers. Decoding alone is the attention of all layers over
caches that grow by a token: SDPA over the part in use, and "kvcache": `flash_attn_with_kvcache`, one plan a token.
Prints medians and the peak of memory; the exit status is 1 if losses disagree beyond rounding.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers

import flash_attn
import flash_attn.integrations.transformers
import flash_attn.sdpa

SIZES = {
    "cuda": {"layers": 16, "dim": 2048, "heads": 32, "heads_k": 8, "head_dim": 64, "vocabulary": 32768},
    "cpu": {"layers": 2, "dim": 64, "heads": 4, "heads_k": 2, "head_dim": 16, "vocabulary": 64},
}
NEW_TOKENS = {"cuda": 32, "cpu": 2}
SHORTER = {"cuda": 1, "cpu": 128}  # sequences of a CPU
ALLOWED = 5e-2  # difference of losses


@dataclass(frozen=True)
class Problem:
    what: str
    batch: int
    seqlen: int  # of a request: its prompt


PROBLEMS = (
    Problem("training", 4, 4096),
    Problem("training", 1, 16384),
    Problem("training, packed documents", 1, 16384),
    Problem("training, padding", 8, 2048),
    Problem("training", 32, 512),
    Problem("request", 1, 8192),
    Problem("request", 32, 2048),
    Problem("decoding alone", 1, 16384),
    Problem("decoding alone", 32, 4096),
)


def make_model(sizes, device):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=sizes["vocabulary"], hidden_size=sizes["dim"], intermediate_size=4 * sizes["dim"],
        num_hidden_layers=sizes["layers"], num_attention_heads=sizes["heads"], num_key_value_heads=sizes["heads_k"],
        head_dim=sizes["head_dim"], max_position_embeddings=32768, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device(device):
        return transformers.LlamaForCausalLM(config)


@contextmanager
def attention(model, name):
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")


def ways(model, device):
    """{way: context in which the model computes}"""
    return {
        "torch": nullcontext,
        "use": lambda: flash_attn.sdpa.use((device,)),
        "fa_native": lambda: attention(model, "fa_native"),
    }


def lengths_of(total, shortest, longest, generator):
    """Random lengths of this sum."""
    found = []
    while sum(found) < total:
        found.append(int(torch.randint(shortest, longest + 1, (), generator=generator)))
    return [*found[:-1], total - sum(found[:-1])]


def batch_of(problem, seqlen, vocabulary, device):
    """The arguments of a training step: documents of 1/32 to 1/4 of the row, sequences of 1/8 to all of it."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (problem.batch, seqlen), generator=generator)
    found = {"input_ids": ids, "labels": ids}
    if "packed" in problem.what:
        documents = lengths_of(seqlen, max(1, seqlen // 32), max(1, seqlen // 4), generator)
        found["position_ids"] = torch.cat([torch.arange(n) for n in documents])[None]
    if "padding" in problem.what:
        lengths = torch.randint(max(1, seqlen // 8), seqlen + 1, (problem.batch, 1), generator=generator)
        found["attention_mask"] = (torch.arange(seqlen) < lengths).long()
        found["labels"] = ids.masked_fill(found["attention_mask"] == 0, -100)
    return {name: x.to(device) for name, x in found.items()}


def training_calls(model, problem, seqlen, device):
    """({way: (context, call)}, what a call returns is a loss)"""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=device == "cuda")
    batch = batch_of(problem, seqlen, model.config.vocab_size, device)

    def step():
        with torch.autocast(device, torch.bfloat16):
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return {name: (context, step) for name, context in ways(model, device).items()}


def request_calls(model, problem, seqlen, device):
    model.to(torch.bfloat16).eval()
    ids = torch.randint(model.config.vocab_size, (problem.batch, seqlen), device=device)
    count = NEW_TOKENS[device]
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}

    def generate():
        model.generate(ids, attention_mask=torch.ones_like(ids), **options)

    return {name: (context, generate) for name, context in ways(model, device).items()}


def decoding_calls(sizes, problem, seqlen, device):
    """NEW_TOKENS tokens of each sequence by the attention of all layers."""
    count, heads, heads_k, head_dim = NEW_TOKENS[device], sizes["heads"], sizes["heads_k"], sizes["head_dim"]
    like = {"device": device, "dtype": torch.bfloat16}
    q = torch.randn(problem.batch, 1, heads, head_dim, **like)
    k, v = (torch.randn(problem.batch, 1, heads_k, head_dim, **like) for _ in "kv")
    shape = (problem.batch, seqlen + count, heads_k, head_dim)
    caches = [[torch.randn(shape, **like) for _ in "kv"] for _ in range(sizes["layers"])]
    lengths = torch.full((problem.batch,), seqlen, dtype=torch.int32, device=device)
    plan = flash_attn.KvCachePlan(lengths, 1, heads, heads_k, head_dim, shape[1], 1)

    def by_sdpa():
        for token in range(seqlen, seqlen + count):
            for cache in caches:
                for whole, new in zip(cache, (k, v)):
                    whole[:, token] = new[:, 0]
                used = (x[:, : token + 1].transpose(1, 2) for x in cache)
                F.scaled_dot_product_attention(q.transpose(1, 2), *used, enable_gqa=True)

    def by_kvcache():
        lengths.fill_(seqlen)
        for _ in range(count):
            plan.update(lengths)
            for cache in caches:
                flash_attn.flash_attn_with_kvcache(q, *cache, k, v, cache_seqlens=lengths, plan=plan)
            lengths.add_(1)

    return {"torch": (nullcontext, by_sdpa), "kvcache": (nullcontext, by_kvcache)}


def timed(context, call, device):
    """(milliseconds, GiB at the peak or None, what it returned)"""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    with context():
        start = time.perf_counter()
        result = call()
        if device == "cuda":
            torch.cuda.synchronize()
        taken = 1e3 * (time.perf_counter() - start)
    return taken, torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None, result


def in_turns(calls, device, rounds):
    """{"ms": {way: median}, "gib": {way: peak}, "losses": {way: those of its calls}}, after a call of each untimed."""
    records = {name: [timed(*calls[name], device)] for name in calls}
    for index in range(rounds):
        names = list(calls)
        for name in names[index % len(names) :] + names[: index % len(names)]:
            records[name].append(timed(*calls[name], device))
    return {
        "ms": {name: statistics.median(ms for ms, _, _ in found[1:]) for name, found in records.items()},
        "gib": {name: found[-1][1] for name, found in records.items()},
        "losses": {name: [loss for _, _, loss in found] for name, found in records.items()},
    }


def measure(model, problem, sizes, device, rounds):
    seqlen = max(8, problem.seqlen // SHORTER[device])
    shown = {**asdict(problem), "seqlen": seqlen, "new_tokens": 0 if "training" in problem.what else NEW_TOKENS[device]}
    if "training" in problem.what:
        return {**shown, **in_turns(training_calls(model, problem, seqlen, device), device, rounds)}
    make = (request_calls, model) if problem.what == "request" else (decoding_calls, sizes)
    with torch.no_grad():
        return {**shown, **in_turns(make[0](make[1], problem, seqlen, device), device, rounds)}


def disagreement(row):
    """Largest difference of the first losses to those of "torch"; 0 where nothing is trained."""
    first = {name: losses[0] for name, losses in row.pop("losses").items()}
    return max(abs(loss - first["torch"]) for loss in first.values()) if first["torch"] is not None else 0.0


def surroundings(device, sizes):
    found = {"type": device, "name": torch.cuda.get_device_name() if device == "cuda" else "CPU"}
    found["threads"] = torch.get_num_threads()
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "transformers": transformers.__version__}
    versions["cudnn"] = torch.backends.cudnn.version()
    return {"device": found, "versions": versions, "flash_attn": flash_attn.__build__, "model": sizes, "rows": []}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path, help="JSON")
    options = parser.parse_args(arguments)
    device, sizes = options.device, SIZES[options.device]
    flash_attn.integrations.transformers.register()
    result, model, worst = surroundings(device, sizes), make_model(sizes, device), 0.0
    for problem in PROBLEMS:
        row = measure(model, problem, sizes, device, options.rounds)
        worst = max(worst, disagreement(row))
        result["rows"].append(row)
        told = ", ".join(f"{name} {ms:.1f} ms" for name, ms in row["ms"].items())
        print(f"{row['what']}, {row['batch']} x {row['seqlen']}: {told}", flush=True)
        if options.out:
            options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    agrees = worst < ALLOWED
    print(f"largest difference of losses {worst:.4f}: {'gains ok' if agrees else 'too large'}")
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
