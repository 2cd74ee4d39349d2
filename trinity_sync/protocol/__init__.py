"""Pure state machines with an injected clock: commit, versions, retention. No Ray, no torch, no input or output."""
