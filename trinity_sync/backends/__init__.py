"""The training engines behind one small interface: each backend describes its tensors as shards.

`option` is the seam: the class that an option of `backend` names contains all that depends on the engine. Only that and
`cpu_platform` are used outside of the trainer's workers. Each backend hides its placement; the packages above see
`trinity_sync.weights` shards.
"""
