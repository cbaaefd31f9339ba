"""Faults at the endpoint: their kinds, which ones are active, and the filter that applies them."""
