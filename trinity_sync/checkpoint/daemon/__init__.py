"""The checkpoint monitor in a process of its own, without Ray: `connecting` finds or starts it, `process` is it, and
`rendezvous` is the file in the checkpoint folder by which the ranks of a program find it.

It outlives the ranks, and the job, by as long as the last commit takes.
"""
