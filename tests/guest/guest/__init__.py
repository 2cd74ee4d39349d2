"""A package of somebody else's: options for a run that Trinity Sync knows nothing of."""
