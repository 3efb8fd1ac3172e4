"""The commit log of a parameter server: one order of everything that changes, and what follows from it. Without I/O."""
