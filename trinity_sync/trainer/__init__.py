"""The trainer: verl's `TrainingWorker` with hooks for versions and checkpoints, the group of its ranks, and the
training loop.
"""
