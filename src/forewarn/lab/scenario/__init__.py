"""Scenarios: YAML files that run in a lab and end with verdicts.

`library/` are those that come with Forewarn.
"""
