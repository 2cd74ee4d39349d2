"""Calls between processes: a typed client for each actor, the channels of its calls (Ray in `calls`, a connection in
`local`), and the waits and errors of all of them. A client is picklable, and each of its methods begins a `PendingCall`
call.
"""
