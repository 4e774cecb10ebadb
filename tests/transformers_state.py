"""What transformers keeps of the flash attention that it loaded last."""

from __future__ import annotations

_FUNCTIONS = (
    "_flash_fn",
    "_flash_varlen_fn",
    "_flash_with_kvcache_fn",
    "_pad_fn",
    "_unpad_fn",
    "_process_flash_kwargs_fn",
    "_process_with_kvcache_kwargs_fn",
)


def keep_loaded_functions(gates, monkeypatch):
    """Let a test load an implementation anew; what was loaded comes back after it."""
    monkeypatch.setattr(gates, "_loaded_implementation", None)
    for name in _FUNCTIONS:
        if hasattr(gates, name):  # older releases lack the last one
            monkeypatch.setattr(gates, name, getattr(gates, name))


def keyword_processors(loaded):
    """What filters the keyword arguments of the functions in lazy_import_flash_attention()'s result: of the varlen
    function, and in newer releases of the KV cache's."""
    processors = loaded[1]
    return processors if isinstance(processors, tuple) else (processors,)
