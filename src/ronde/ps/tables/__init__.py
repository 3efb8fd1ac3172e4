"""Embedding tables on a parameter server: what all know of one, a worker that reads rows, a server that keeps them."""
