"""Crossings between processes: one kernel that calls, waits and words errors (`calls`), and above it a typed client of
each actor.

A client is made from an actor's handle and is passed on in its place. Its methods have the signatures of the actor's;
what they return is a `Call`, which is waited for with a limit, or nothing where nobody waits.
"""
