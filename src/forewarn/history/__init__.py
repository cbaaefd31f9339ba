"""What happened: entries, queries, retention, the live feed and webhooks."""
