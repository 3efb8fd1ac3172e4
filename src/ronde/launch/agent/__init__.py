"""The agent: one per host, the parent of the host's ranks."""
