"""Crossings between processes: a client of each actor, whose calls are carried by Ray (`calls`) or by a connection to
an actor in a local process (`local`), and one way to wait for them and to word what goes wrong.

A client is made from an actor's handle and is passed on in its place. Its methods have the signatures of the actor's;
what they return is a `Pending` call, which is waited for with a limit, or nothing where nobody waits.
"""
