"""Actors in processes without Ray."""
