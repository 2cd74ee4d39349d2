"""Compares a run with its repetition, and writes the bundle file that carries a run to another machine.

The command `trinity-sync reproduce` runs the repetition.
"""
