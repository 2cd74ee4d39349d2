"""Whether a run that was repeated came to the same: what both computed, where they ran, and the file that carries a run
elsewhere. Pure; the command `trinity-sync reproduce` runs the repetition.
"""
