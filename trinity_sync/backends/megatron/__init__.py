"""verl's Megatron engine (megatron-core and mbridge) as a backend: `backend=megatron`.

- `engine`: verl's engine with what upstream leaves open: the CPU adapter, the bridges, the optimizer's state.
- `cpu`: megatron-core on a machine without an accelerator. Never active where there is one.
- `bridges`, `layers`: which model families there are, and their layers where Transformer Engine is missing.
- `placement`: which rectangle of which Hugging Face tensor a local parameter holds.
- `checkpoint`, `writer`, `optimizer_state`: full checkpoints in verl's folders, by megatron-core's own means.
- `option`: what `backend=megatron` names: the checks, verl's engine config, and the way to the rest.
- `resume`: whether a checkpoint can be loaded in a layout.
- `backend`: `trinity_sync.backends.base.Backend` on top of these.

But for `option`, `families` and `resume`, nothing here is imported by a run with another backend: megatron-core takes
seconds to import.
"""
