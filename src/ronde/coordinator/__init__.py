"""The coordinator: who is in the round, which named operations may run, who is late. Hosted by rank 0 or a launcher."""
