"""What there is one of on each node of the trainer: the agent, a host of slots, a digester of versions and a writer of
training states.
"""
