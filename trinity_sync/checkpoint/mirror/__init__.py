"""A second place for committed full checkpoints. `copies` reads and writes the place; `run_mirror` is called by the
driver and the monitor of a run, and does that work in a child process.
"""
