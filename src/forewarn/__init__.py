"""Forewarn: gives VMs notice before they are rebooted, moved or deleted, and lets them approve."""

__version__ = "0.3.0"
