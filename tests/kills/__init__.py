"""A campaign of real kills: runs lose a process, a file or their disk at a random instant, and are resumed.

    python -m tests.kills --trials 200 --parallel 2 --out outputs/kills/trials.jsonl

A *chain* is one run that is struck again and again. What a blow leaves is looked at, the run is resumed in place, and
the resume is the subject of the next blow; the last one runs to its end. Each blow is a *trial*, one line in the JSONL.
"""
