"""Every option and its default. A package, so that `hydra.searchpath=[pkg://trinity_sync.conf]` finds it."""
