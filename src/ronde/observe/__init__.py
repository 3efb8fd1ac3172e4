"""Observation of a running job: typed events, sums per operation, a timeline of all ranks, stalls, stragglers, stacks.

Nothing here opens a socket or starts a thread. The ranks and the coordinator call it and send its results.
"""
