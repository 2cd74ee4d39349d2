"""The campaign: random programs over the real protocol and store code, with crashes, on a simulated disk and clock.

``python -m tests.campaign --seed S --trials N`` runs N trials, ``--trial K`` that one again. A trial is one random
program: runs that save and publish, users who prune and pin, readers, deaths of processes, power cuts, a disk that
fails, resumes. A failure prints the invariant that did not hold, and the operations before it.
"""
