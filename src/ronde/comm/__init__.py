"""Collectives: groups, operations, the engine, and the backends that move the bytes.

world, current     everything between init() and shutdown(); the one of this process
group, collectives the operations, as methods and as functions; objects, plan: for Python objects and for buckets
dispatch, lane     a group's channels and what is under way on them; work: a caller's handle
engine, named      the thread that talks to the coordinator; named operations in flight
coordination/      the coordinator's side
backend            the seam below: native (C++), threads/, mpi/
"""
