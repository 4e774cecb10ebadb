# pip install . tqdm
"""Generates text with a paged KV cache: a small server loop around flash_attn_with_kvcache.

python examples/generate_paged.py [--device cpu|cuda] [--steps N] [--new-tokens N] [--page-size N] [--no-graph]

Trains a character-level GPT on a book for some steps, then continues passages of it. Requests wait for one of a few
slots; each slot decodes one token per step, all slots in one batch. The keys and values of all requests lie in one
pool of pages: a request takes a page when it grows into it and gives its pages back when it is done. Empty slots have
length -1, which attention skips. One plan per kind of layer is updated once a step; on a GPU a step is a CUDA graph.

In the end every token's logits are compared with those of the whole text computed at once, without a cache. The exit
status is 1 when they differ by more than rounding.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Threads that spin while they wait slow a busy machine down tenfold; the OpenMP runtime reads this when torch loads it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

import flash_attn
from flash_attn.layers.rotary import apply_rotary_emb

TEXT = ROOT / "examples" / "data" / "alice.txt"
LAYERS, HEADS, KV_HEADS, HEAD_DIM, WINDOW = 4, 4, 2, 32, 64  # every second layer sees the last WINDOW characters only
CONTEXT = 512
PREFILL_CHUNK = 48
ALLOWED_ERROR = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # of the logits, relative to their largest


class Block(nn.Module):
    """Attention (grouped queries, rotary positions, causal, window) and an MLP."""

    def __init__(self, width, window):
        super().__init__()
        self.window = window
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project_in = nn.Linear(width, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        self.project_out = nn.Linear(HEADS * HEAD_DIM, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x, attention):
        """x (b, s, width); attention(block, q, k, v) gets q (b, s, HEADS, d), k and v (b, s, KV_HEADS, d) unrotated."""
        heads = self.project_in(self.norm_attention(x)).unflatten(-1, (HEADS + 2 * KV_HEADS, HEAD_DIM))
        attended = attention(self, *heads.split((HEADS, KV_HEADS, KV_HEADS), dim=2))
        x = x + self.project_out(attended.flatten(2))
        return x + self.mlp(self.norm_mlp(x))


class CharacterGPT(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        width = HEADS * HEAD_DIM
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, WINDOW if i % 2 else -1) for i in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)
        angles = torch.arange(CONTEXT)[:, None] * 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, ids, attention=None):
        """ids (b, s) -> logits (b, s, vocabulary); by default without a cache, from position 0."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, attention or self.attend)
        return self.head(self.norm(x))

    def attend(self, block, q, k, v):
        cos, sin = self.cos[: q.shape[1]].to(q.dtype), self.sin[: q.shape[1]].to(q.dtype)
        q, k = apply_rotary_emb(q, cos, sin), apply_rotary_emb(k, cos, sin)
        return flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(block.window, 0))


@dataclass
class Request:
    prompt: list[int]
    wanted: int
    generated: list[int] = field(default_factory=list)
    logits: list = field(default_factory=list)  # of every generated token
    pages: list[int] = field(default_factory=list)


class PagedDecoder:
    """The slots, the pool of pages, and one decoding step over all slots."""

    def __init__(self, model, slots, page_size, num_pages, use_graph):
        self.model, self.page_size, self.slots = model, page_size, slots
        weight = model.embedding.weight
        pool = (num_pages, page_size, KV_HEADS, HEAD_DIM)
        self.caches = {block: [weight.new_zeros(pool) for _ in "kv"] for block in model.blocks}
        self.free = list(range(num_pages))
        self.requests: list[Request | None] = [None] * slots
        device, max_pages = weight.device, -(-CONTEXT // page_size)
        self.tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        self.lengths = torch.full((slots,), -1, dtype=torch.int32, device=device)
        self.table = torch.full((slots, max_pages), -1, dtype=torch.int32, device=device)
        sizes = (self.lengths, 1, HEADS, KV_HEADS, HEAD_DIM, max_pages * page_size, 1, True)
        self.angles = [x.to(weight.dtype) for x in (model.cos, model.sin)]
        self.plans = {w: flash_attn.KvCachePlan(*sizes, (w, 0)) for w in (-1, WINDOW)}
        self.step = self.captured_step() if use_graph else self.decode

    def attention(self, table, lengths, plans):
        """How the blocks attend: the new k and v go into the pages of the table's rows, rotated like q."""
        cos, sin = self.angles

        def attend(block, q, k, v):
            return flash_attn.flash_attn_with_kvcache(
                q, *self.caches[block], k, v, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=False,
                cache_seqlens=lengths, block_table=table, causal=True, window_size=(block.window, 0),
                plan=plans and plans[block.window],
            )  # fmt: skip

        return attend

    def decode(self):
        """One token of every slot: logits (slots, vocabulary) of the next ones."""
        for plan in self.plans.values():
            plan.update(self.lengths)
        return self.model(self.tokens[:, None], self.attention(self.table, self.lengths, self.plans))[:, 0]

    def captured_step(self):
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.decode()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                logits = self.decode()
        torch.cuda.current_stream().wait_stream(stream)

        def replay():
            graph.replay()
            return logits

        return replay

    def grow(self, slot, length):
        """Give the request of a slot the pages for so many rows."""
        request = self.requests[slot]
        while len(request.pages) * self.page_size < length:
            request.pages.append(self.free.pop())
            self.table[slot, len(request.pages) - 1] = request.pages[-1]

    def start(self, slot, request):
        """Put a request into a slot: its prompt, in chunks, all but the last character."""
        self.requests[slot] = request
        for first in range(0, len(request.prompt) - 1, PREFILL_CHUNK):
            chunk = request.prompt[first : min(first + PREFILL_CHUNK, len(request.prompt) - 1)]
            self.grow(slot, first + len(chunk))
            ids = torch.tensor([chunk], device=self.tokens.device)
            self.model(ids, self.attention(self.table[slot : slot + 1], first, None))
        self.tokens[slot] = request.prompt[-1]
        self.lengths[slot] = len(request.prompt) - 1

    def finish(self, slot):
        self.free += self.requests[slot].pages
        self.requests[slot] = None
        self.table[slot] = -1
        self.lengths[slot] = -1

    def advance(self, choose):
        """One step of all slots; requests that are done leave. Returns the number of new tokens."""
        active = [slot for slot in range(self.slots) if self.requests[slot] is not None]
        for slot in active:
            request = self.requests[slot]
            self.grow(slot, len(request.prompt) + len(request.generated))
        logits = self.step().clone()
        tokens = choose(logits)
        self.tokens.copy_(tokens)
        self.lengths += self.lengths >= 0
        for slot, token in zip(active, tokens[active].tolist()):
            request = self.requests[slot]
            request.generated.append(token)
            request.logits.append(logits[slot])
            if len(request.generated) == request.wanted:
                self.finish(slot)
        return len(active)


@torch.no_grad()
def serve(decoder, requests, choose):
    """Run all requests; returns (tokens per second, most pages in use)."""
    waiting, done, used = list(requests), 0, 0
    pages = len(decoder.free)
    bar = tqdm(total=sum(request.wanted for request in requests), unit="character", disable=None)
    start = time.perf_counter()
    with bar:
        while waiting or any(decoder.requests):
            for slot in range(decoder.slots):
                if decoder.requests[slot] is None and waiting:
                    decoder.start(slot, waiting.pop(0))
            advanced = decoder.advance(choose)
            done, used = done + advanced, max(used, pages - len(decoder.free))
            bar.set_postfix_str(f"{pages - len(decoder.free)} pages in use", refresh=False)
            bar.update(advanced)
    return done / (time.perf_counter() - start), used


@torch.no_grad()
def largest_error(model, requests):
    """Largest difference of the logits to those of the whole text without a cache, relative to the largest logit."""
    worst = 0.0
    for request in requests:
        ids = torch.tensor([request.prompt + request.generated], device=model.embedding.weight.device)
        whole = model(ids)[0, len(request.prompt) - 1 : -1].float()
        worst = max(worst, ((torch.stack(request.logits).float() - whole).abs().max() / whole.abs().max()).item())
    return worst


def train(model, ids, steps, device):
    optimizer, bar = torch.optim.AdamW(model.parameters(), lr=2e-3), tqdm(range(steps), desc="training", disable=None)
    generator = torch.Generator().manual_seed(0)
    for step in bar:
        starts = torch.randint(len(ids) - 129, (8,), generator=generator).tolist()
        rows = torch.stack([ids[s : s + 129] for s in starts]).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            bar.set_postfix_str(f"loss {loss.item():.2f} nats per character", refresh=False)


def make_requests(ids, count, new_tokens):
    """Passages of different lengths from the end of the book, which is not trained on."""
    lengths = [5 + 37 * i % 150 for i in range(count)]
    starts = [len(ids) - 2000 + 131 * i for i in range(count)]
    return [Request(ids[s : s + n].tolist(), new_tokens + 7 * (i % 3)) for i, (s, n) in enumerate(zip(starts, lengths))]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cpu or cuda (default: the GPU if the install has kernels for it)")
    parser.add_argument("--steps", type=int, default=150, help="training steps")
    parser.add_argument("--requests", type=int, default=10)
    parser.add_argument("--slots", type=int, default=4, help="requests that are decoded together")
    parser.add_argument("--new-tokens", type=int, default=100, help="characters to generate per request")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=0.5, help="0 takes the most probable character")
    parser.add_argument("--no-graph", action="store_true", help="no CUDA graph")
    options = parser.parse_args(arguments)
    on_gpu = torch.cuda.is_available() and "cuda" in flash_attn.__build__["backends"]
    device = torch.device(options.device or ("cuda" if on_gpu else "cpu"))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    text = TEXT.read_text(encoding="ascii")
    characters = sorted(set(text))
    index = {character: i for i, character in enumerate(characters)}
    ids = torch.tensor([index[character] for character in text])
    torch.manual_seed(0)
    model = CharacterGPT(len(characters)).to(device)
    train(model, ids[:-2000], options.steps, device)
    model.to(dtype)

    def choose(logits):
        if options.temperature == 0:
            return logits.argmax(-1)
        return torch.multinomial((logits.float() / options.temperature).softmax(-1), 1)[:, 0]

    requests = make_requests(ids, options.requests, options.new_tokens)
    needed = max(len(r.prompt) + r.wanted for r in requests)
    if needed > CONTEXT:
        parser.error(f"--new-tokens: expected prompts and new characters of at most {CONTEXT}, got {needed}")
    pages = options.slots * -(-needed // options.page_size)
    graph = device.type == "cuda" and not options.no_graph
    with torch.no_grad():
        decoder = PagedDecoder(model, options.slots, options.page_size, pages, graph)
    speed, used = serve(decoder, requests, choose)
    for request in requests[:3]:
        texts = ["".join(characters[i] for i in part) for part in (request.prompt, request.generated)]
        print(f"--- {texts[0][-60:]!r} ->\n{texts[1]}")
    error = largest_error(model, requests)
    failed = not error <= ALLOWED_ERROR[dtype] or len(decoder.free) != pages
    mode = "graph replay" if graph else "eager"
    print(f"{len(requests)} requests in {options.slots} slots: {speed:.0f} characters/s on {device.type}, {mode}")
    print(f"at most {used} of {pages} pages of {options.page_size} rows in use")
    verdict = f"relative error {error:.1e}, allowed {ALLOWED_ERROR[dtype]:.0e}  {'FAILED' if failed else 'ok'}"
    print(f"logits against the whole text at once: {verdict}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
