"""Scenarios: stories in YAML, played in a lab and judged.

`library/` are those that come with Forewarn.
"""
