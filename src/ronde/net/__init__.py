"""Connections between the processes of a job: addresses, keys, sockets, messages and the event loop. Knows no tensors."""
