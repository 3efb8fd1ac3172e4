"""Connections between the processes of a job: addresses, keys, sockets, messages, the event loop. Knows no tensors."""
