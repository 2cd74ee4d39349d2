"""The figures of the documentation. `python -m docs.figures` draws all of them again."""
