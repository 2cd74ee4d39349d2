"""What a run leaves behind and shows: its folder, run.json, metrics, events, summary, the live view and trackers.

The driver's loop talks to one `Recorder`; everything else here is a part of it that also works alone. Importing any
of it loads neither torch nor Ray.
"""
