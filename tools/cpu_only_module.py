"""flash_attn_2_cuda of an install without CUDA kernels: it can be imported, and every function says what is missing.

Clients import from the module before they ask for a GPU: Transformer Engine takes varlen_bwd wherever it finds the
distribution flash-attn. setup.py copies this file into installs that have the CPU backend only.
"""

CPU_ONLY = True  # what flash_attn.backends knows it by

WHAT_IS_MISSING = (
    "this flash_attn was installed without its CUDA kernels and has the CPU backend only; reinstall it on a machine "
    "with nvcc and a CUDA build of torch (pip install --no-build-isolation --force-reinstall --no-deps .)"
)


def _missing(name):
    def function(*args, **kwargs):
        raise RuntimeError(f"flash_attn_2_cuda.{name}: {WHAT_IS_MISSING}")

    function.__name__ = function.__qualname__ = name
    function.__doc__ = "Raises RuntimeError: there are no CUDA kernels here."
    return function


fwd = _missing("fwd")
varlen_fwd = _missing("varlen_fwd")
bwd = _missing("bwd")
varlen_bwd = _missing("varlen_bwd")
fwd_kvcache = _missing("fwd_kvcache")
