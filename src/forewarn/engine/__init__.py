"""Where the rules meet the world: one way to change anything, what polls read, and the few loops."""
