"""The lab inside somebody's test suite: `Lab` and what a test holds of it."""
