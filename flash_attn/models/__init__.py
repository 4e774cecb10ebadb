"""Not part of this package: importing it raises an error that names the replacement."""

raise ModuleNotFoundError(
    "flash_attn.models: the models of flash_attn 2.8.3 are not part of this package. Use those of transformers with "
    'attn_implementation="flash_attention_2" (docs/migrating.md)',
    name=__name__,
)
