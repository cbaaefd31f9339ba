"""Faults at the endpoint: what they are, which are in force, and the filter that does them."""
