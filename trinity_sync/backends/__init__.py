"""The training engines behind one small interface: what a backend holds (shards in Hugging Face coordinates) and where.

Used by the trainer's workers only. Each backend hides its placement; the rooms above see `trinity_sync.weights` shards.
"""
