"""An actor in a process of this machine or another, without Ray: `server` hosts it, `handle` calls it over TCP.

Either side proves with a secret that it is who it says before the other unpickles anything of it (`frames`). A message
is a pickled (id, method, arguments); many calls are under way on one connection, and answers come as they are ready.
"""
