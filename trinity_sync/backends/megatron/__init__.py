"""verl's Megatron engine (megatron-core and mbridge) as a backend: `backend=megatron`.

- `megatron_engine`: verl's engine with our additions: the CPU adapter, the bridges, the optimizer's state.
- `cpu`: megatron-core on a machine without an accelerator. Never active where there is one.
- `bridges`: the model families, their layers without Transformer Engine, and the rectangles of Hugging Face tensors
  that a local parameter holds.
- `writer`, `optimizer_state`: full checkpoints in verl's folders, by megatron-core's own means.
- `option`: the option `backend=megatron`: the checks, verl's engine config, and the way to the rest.
- `megatron_families`: the families for the checks, and whether a checkpoint can be loaded in a layout.
- `backend`: `trinity_sync.backends.base.Backend` on top of these.

A run with another backend imports only `option` and `megatron_families`: megatron-core takes seconds to import.
"""
