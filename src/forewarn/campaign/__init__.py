"""Rolling maintenance: hosts are taken a few at a time, within every scope's budget."""
