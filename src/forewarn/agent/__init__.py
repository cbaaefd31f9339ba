"""The agent inside a VM: prepares for what is announced, approves, and recovers.

Standard library only.
"""
