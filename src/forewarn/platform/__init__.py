"""Platforms: what carries out impacts on VMs."""
