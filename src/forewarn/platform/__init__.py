"""Carrying an impact out."""
