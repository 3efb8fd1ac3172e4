"""What a job can tell about itself: typed events, sums per operation, a timeline of all ranks, stalls, stacks, clocks.

Nothing here opens a socket or starts a thread; comm and net call it and carry what it says.
"""
