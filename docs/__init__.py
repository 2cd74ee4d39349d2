"""The documentation. Only the sources of its figures are code."""
