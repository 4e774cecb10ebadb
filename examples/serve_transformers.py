# pip install '.[examples]'
"""A model of transformers generates from a paged KV cache: a small server loop around "fa_native".

    python examples/serve_transformers.py [--device cuda] [--model llama] [--page-size 16]

The model has the shape of gpt-oss (sinks, sliding windows, experts) and random weights. Requests wait for one of a few
slots; each slot decodes one token per step, all slots in one batch, whose keys and values lie in one pool of pages.
`PagedCache.update` hands the pages to the attention function, which appends to them and reads them.

In the end every token's logits are compared with those of the whole text at once, without a cache, by eager attention
in float32; the exit status is 1 when they differ by more than rounding. On the CPU the tokens must be those of
`generate` with eager attention, too.

Needs a release of transformers whose models hand their keyword arguments to the cache (5.24 does, 5.17 does not).
"""

from __future__ import annotations

import argparse
import inspect
import sys
from dataclasses import dataclass, field

import torch
import transformers

import flash_attn.integrations.transformers

SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.2,
    "pad_token_id": 0, "eos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {
    "gpt-oss": (
        transformers.GptOssConfig,
        # every token goes to every expert: a choice of experts would make a rounding a jump
        {"num_local_experts": 2, "num_experts_per_tok": 2, "sliding_window": 16,
         "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "llama": (transformers.LlamaConfig, {}),
}  # fmt: skip
ALLOWED_ERROR = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


class PagedCache(transformers.Cache):
    """Pages of all slots, one pool a layer, and the tables and lengths of the rows of the next call."""

    def __init__(self, config, pages, page_size, device, dtype):
        super().__init__(layers=[])
        shape = (config.num_hidden_layers, 2, pages, page_size, config.num_key_value_heads, config.head_dim)
        self.pools = torch.zeros(shape, device=device, dtype=dtype)
        self.page_size, self.free = page_size, list(range(pages))
        self.table = self.lengths = None

    def update(self, key_states, value_states, layer_idx, *args, kwargs, **options):
        """Nothing is written here: the attention function gets the pages with the layer's keyword arguments."""
        k_cache, v_cache = self.pools[layer_idx]
        kwargs.update(k_cache=k_cache, v_cache=v_cache, block_table=self.table, cache_seqlens=self.lengths)
        return key_states, value_states


@dataclass
class Request:
    prompt: list[int]
    wanted: int
    tokens: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)  # of each of them
    pages: list[int] = field(default_factory=list)

    def length(self):
        return len(self.prompt) + max(len(self.tokens) - 1, 0)  # of what is in the cache


class Server:
    def __init__(self, model, slots, page_size, longest):
        self.model, self.device = model, model.device
        self.columns = -(-longest // page_size)
        self.slots: list[Request | None] = [None] * slots
        self.cache = PagedCache(model.config, slots * self.columns, page_size, self.device, model.dtype)

    def run(self, requests, ids):
        """Append a token to each request (None: padding), of which ids (batch, seqlen) are not in the cache yet."""
        cache = self.cache
        lengths = [-1 if r is None else r.length() - (ids.shape[1] if not r.tokens else 0) for r in requests]
        table = torch.full((len(requests), self.columns), -1, dtype=torch.int32)
        for row, (request, length) in enumerate(zip(requests, lengths)):
            if request is not None:
                while len(request.pages) * cache.page_size < length + ids.shape[1]:
                    request.pages.append(cache.free.pop())
                table[row, : len(request.pages)] = torch.tensor(request.pages)
        cache.table, cache.lengths = table.to(self.device), torch.tensor(lengths, dtype=torch.int32, device=self.device)
        positions = cache.lengths.clamp(min=0)[:, None] + torch.arange(ids.shape[1], device=self.device)
        out = self.model(input_ids=ids.to(self.device), position_ids=positions, cache=cache, use_cache=True)
        for request, logits, token in zip(requests, out.logits[:, -1], out.logits[:, -1].argmax(-1).tolist()):
            if request is not None:
                request.logits.append(logits)
                request.tokens.append(token)

    def step(self, waiting):
        """Fill free slots, a prompt at a time, then decode one token of every slot."""
        for slot, request in enumerate(self.slots):
            if request is None and waiting:
                request = self.slots[slot] = waiting.pop(0)
                self.run([request], torch.tensor([request.prompt]))
        last = [[0] if request is None else request.tokens[-1:] for request in self.slots]
        self.run(self.slots, torch.tensor(last))
        for slot, request in enumerate(self.slots):
            if request is not None and len(request.tokens) >= request.wanted:
                self.cache.free += request.pages
                self.slots[slot] = None

    @torch.no_grad()
    def serve(self, requests):
        waiting = list(requests)
        while waiting or any(self.slots):
            self.step(waiting)


def hands_arguments_to_the_cache():
    """Whether the models of this release do; older ones call the cache `past_key_values` and ignore other names."""
    return "cache" in inspect.signature(transformers.LlamaModel.forward).parameters


def make_model(name, attention, device, dtype):
    config_class, options = MODELS[name]
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(
        config_class(**SIZES, **options), attn_implementation=attention, dtype=torch.float32
    )
    return model.to(torch.bfloat16).to(device, dtype).eval()


@torch.no_grad()
def largest_error(model, requests):
    """Of the logits, relative to the largest; model: the reference."""
    error = largest = 0.0
    for request in requests:
        text = torch.tensor([request.prompt + request.tokens[:-1]], device=model.device)
        right = model(input_ids=text).logits[0, len(request.prompt) - 1 :]
        error = max(error, (torch.stack(request.logits).float() - right).abs().max().item())
        largest = max(largest, right.abs().max().item())
    return error / largest


def generated(model, request):
    """What `generate` makes of the prompt alone."""
    ids = torch.tensor([request.prompt], device=model.device)
    options = {"max_new_tokens": request.wanted, "do_sample": False}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :].tolist()


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", choices=MODELS, default="gpt-oss")
    for name, default in {"requests": 6, "slots": 3, "new-tokens": 12, "page-size": 16}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(arguments)
    if not hands_arguments_to_the_cache():
        parser.error(f"transformers {transformers.__version__} does not hand keyword arguments to its cache")
    flash_attn.integrations.transformers.register()
    generator = torch.Generator().manual_seed(0)
    requests = []
    for i in range(options.requests):
        prompt = torch.randint(1, SIZES["vocab_size"], (5 + 7 * i,), generator=generator).tolist()
        requests.append(Request(prompt, options.new_tokens + i % 3))
    longest = max(len(r.prompt) + r.wanted for r in requests)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    model = make_model(options.model, "fa_native", options.device, dtype)
    server = Server(model, options.slots, options.page_size, longest)
    server.serve(requests)

    reference = make_model(options.model, "eager", options.device, torch.float32)
    error = largest_error(reference, requests)
    good = error <= ALLOWED_ERROR[dtype] and len(server.cache.free) == options.slots * server.columns
    print(f"{len(requests)} requests in {options.slots} slots, relative error of the logits {error:.1e}")
    if options.device == "cpu":
        equal = sum(request.tokens == generated(reference, request) for request in requests)
        good = good and equal == len(requests)
        print(f"{equal} of {len(requests)} texts are those of generate")
    print("serve ok" if good else "serve FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
