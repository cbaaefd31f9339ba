"""Forewarn: tell a virtual machine, in time, what is about to happen to it, and let it answer."""

__version__ = "0.3.0"
