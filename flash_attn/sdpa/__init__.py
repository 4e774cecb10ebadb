"""PyTorch's scaled_dot_product_attention (SDPA) by these kernels. Two ways, which may be combined:

- `register`: a provider for `torch.nn.attention.activate_flash_attention_impl`, in versions of torch with that
  function: every call that PyTorch sends to its flash attention in this process comes here, those of
  `torch.nn.attention.varlen.varlen_attn` included.
- `use`: a scope in which `torch.nn.functional.scaled_dot_product_attention` calls these kernels where they support the
  call, for any backend that PyTorch would choose: also causal with seqlen_q != seqlen_k, or another head dim of v.

docs/sdpa.md says which calls each of them takes.
"""

from flash_attn.sdpa.provider import register
from flash_attn.sdpa.scope import use

__all__ = ["register", "use"]
