"""The training engines behind one small interface: what a backend holds (shards in Hugging Face coordinates) and where.

`option` is the seam: the class that an option of `backend` names says all that depends on the engine. But for that and
`platform` this is used by the trainer's workers only. Each backend hides its placement; the packages above see
`trinity_sync.weights` shards.
"""
