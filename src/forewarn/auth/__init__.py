"""Tokens and roles: who may call the control API."""
