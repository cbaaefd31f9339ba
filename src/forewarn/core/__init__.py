"""The rules. Pure: no clock, no input or output, no ids made here."""
