"""The contents of a checkpoint folder: what is on disk, who holds it, and how it is deleted."""
