"""Collectives: groups, operations, named operations, and the backends that move the bytes.

world, joining, launchers    between init() and shutdown(); how a rank finds its round; who started the process
collectives, group, objects  the operations as functions and as methods, and for Python objects
mailbox                      messages that a handler takes as they come
arguments, buffers           what the caller gave, checked; its memory
work, operations             the operation that a caller asked for, and its result
call, channel, open_channels what a channel executes; the calls under way on one channel; all channels of this rank
plan                         buckets that are agreed once
named_operations             operations that are matched by name
control_thread, telemetry    the thread that talks to the coordinator, and what it reports
fork_and_signal_safety       refuses forked children, and operations inside of operations
backends/                    what moves the bytes: native (C++), mpi, single_rank
"""
