"""A second place for committed full checkpoints: `storage` reaches it, `copies` knows what lies there, `process` keeps
that work in a process of its own, and `run` is what the driver and the monitor of a run do with it.
"""
