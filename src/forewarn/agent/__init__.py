"""The agent inside a VM: prepares for scheduled events, approves them, and recovers.

Standard library only.
"""
