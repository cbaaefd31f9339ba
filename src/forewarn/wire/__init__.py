"""Bytes to values and back. Pure."""
