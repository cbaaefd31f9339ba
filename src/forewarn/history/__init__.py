"""What happened: queries, retention, the live feed and webhooks. Entries are the engine's."""
