"""Keys, bytes and revisions. The store knows no events and imports no rules."""
