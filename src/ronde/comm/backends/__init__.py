"""What moves the data of a channel: the native library (C++), MPI, or nothing in a group of one rank.

base                           the seam: what a backend has to do, and how to add one
native                         channels of the native library: collectives
native_links, native_messages  its links between hosts; send, receive and mailboxes
native_library, hot_calls      its functions through ctypes, and through an extension for calls that repeat
mpi/                           the same through mpi4py
single_rank                    groups of one member

make_backend() of comm/joining chooses.
"""
