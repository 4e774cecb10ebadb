"""What FlashAttention-3's builds say of themselves: clients read CONFIG["build_flags"] for features that are missing.

Only V in column-major order is missing here. `flash_attn.__build__` says whether the CUDA extension is installed.
"""

_FEATURES = (
    "BACKWARD",
    "SPLIT",
    "PAGEDKV",
    "APPENDKV",
    "LOCAL",
    "SOFTCAP",
    "PACKGQA",
    "FP16",
    "FP8",
    "VARLEN",
    "CLUSTER",
)
_HEAD_DIMS = (64, 96, 128, 192, 256)

CONFIG = {
    "build_flags": {
        **{f"FLASHATTENTION_DISABLE_{feature}": False for feature in _FEATURES},
        **{f"FLASHATTENTION_DISABLE_HDIM{head_dim}": False for head_dim in _HEAD_DIMS},
        "FLASHATTENTION_DISABLE_SM8x": False,
        "FLASHATTENTION_ENABLE_VCOLMAJOR": False,
    }
}


def show() -> None:
    """Print the configuration."""
    for section, values in CONFIG.items():
        print(f"{section}:")
        for name, value in values.items():
            print(f"  {name}: {value}")
