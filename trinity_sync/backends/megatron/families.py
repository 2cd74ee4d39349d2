"""Which models `backend=megatron` trains. Imports nothing, since the checks of a configuration ask, too."""

FAMILIES = ("llama", "qwen2", "qwen3")
"""Model families of transformers; `bridges` has a bridge for each."""
