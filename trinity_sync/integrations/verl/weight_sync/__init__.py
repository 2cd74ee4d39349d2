"""Weight sync as a backend of verl's: from the trainer's ranks to the rollout, through memory, a process group or a
folder. A receiver checks all digests before a version is whole.

verl's `CheckpointEngineManager` calls the engines of `checkpoint_engine`, whose import registers them. This package
itself loads neither torch nor verl.
"""
