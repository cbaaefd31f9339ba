"""The metadata listener: what a VM may call."""
