"""The model that a run begins with where it names none."""
