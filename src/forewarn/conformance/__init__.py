"""Conformance: the rules of the protocol as black-box checks, for any Scheduled Events endpoint.

Standard library only. The rules are written here from the protocol, independent of our server:
nothing of `core`, `wire` or `web` may be imported.
"""
