"""The control listener: what an operator may call."""
