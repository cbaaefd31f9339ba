"""Conformance: the wire rules as black-box checks, for any Scheduled Events endpoint. Standard
library only.

What is right is written here from the protocol, apart from the server: nothing of `core`, `wire` or
`web` may be imported.
"""
