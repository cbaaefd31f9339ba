"""Scopes at runtime: the one way to write, what polls read, and the worker."""
