"""A provider of flash attention for PyTorch's registry: `torch.nn.attention.activate_flash_attention_impl`."""

from __future__ import annotations

import warnings
from functools import partial

import torch
from torch.nn import attention

from flash_attn import backends
from flash_attn.sdpa import biased_operators, operators

OPERATORS = {**operators.OPERATORS, **biased_operators.OPERATORS}


def register(name: str = "flash_attn", *, disable_cudnn: bool = True) -> None:
    """Make these kernels a flash attention implementation of PyTorch, which `name` activates.

    After `torch.nn.attention.activate_flash_attention_impl(name)`, what PyTorch sends to its flash attention comes
    here, in the whole process: `scaled_dot_product_attention` where its flash backend is chosen, `varlen_attn`, nested
    tensors; compiled code too, if the activation came before. On CUDA tensors where the CUDA extension is installed;
    `varlen_attn` then also takes CPU tensors. `torch.nn.attention.restore_flash_attention_impl()` undoes it.

    Arguments:
        name: str, of the implementation.
        disable_cudnn: bool. Switch PyTorch's cuDNN attention off while the implementation is active. PyTorch prefers it
            to flash attention on GPUs of compute capability 9 and 10, so that little would come here.

    Raises RuntimeError where torch has no such registry; `flash_attn.sdpa.use` needs none.
    """
    if not hasattr(attention, "register_flash_attention_impl"):
        raise RuntimeError(
            "torch: expected a version with torch.nn.attention.register_flash_attention_impl, "
            f"got {torch.__version__} (flash_attn.sdpa.use needs no registry)"
        )
    attention.register_flash_attention_impl(name, register_fn=partial(_Activation, disable_cudnn))


class _Activation:
    """Our kernels in place of torch's, until `remove`: the handle that torch's registry keeps."""

    def __init__(self, disable_cudnn: bool) -> None:
        has_cuda = backends.cuda_extension() is not None
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():  # torch warns of the first kernel replaced in a process
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            for name, function in OPERATORS.items():
                if hasattr(torch.ops.aten, name):
                    for key in ("CUDA", "CPU") if has_cuda else ("CPU",):
                        self._library.impl(name, function, key)
        self._enables_cudnn = disable_cudnn and has_cuda and torch.backends.cuda.cudnn_sdp_enabled()
        if self._enables_cudnn:
            torch.backends.cuda.enable_cudnn_sdp(False)

    def remove(self) -> None:
        """Give the operators and the cuDNN attention back to torch."""
        self._library._destroy()
        if self._enables_cudnn:
            torch.backends.cuda.enable_cudnn_sdp(True)
