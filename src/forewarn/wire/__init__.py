"""The Azure wire format: bytes to values and back. Pure."""
