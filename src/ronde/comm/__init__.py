"""Collectives: groups, operations, named operations, and the backends that move the bytes.

world, joining, launchers    between init() and shutdown(); how a rank finds its round; who started the process
collectives, group, objects  the operations as functions and as methods, and for Python objects
work, call, buffers          the operation that a caller asked for, what a channel executes, the memory of both
channel, plan                calls under way on a channel; buckets that are agreed once
named_operations             operations that are matched by name, and all open channels
control_thread, telemetry    the thread that talks to the coordinator, and what it reports
backends/                    native (C++), mpi, single_rank
"""
