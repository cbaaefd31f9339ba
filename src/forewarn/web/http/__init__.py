"""HTTP connections and their limits, listeners, TLS and rate limits."""
