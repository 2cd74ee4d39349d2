"""Models on disk and in transformers: files, classes, layers of adapters, shapes, tokens; the model that a run makes
itself.
"""
