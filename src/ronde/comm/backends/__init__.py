"""What moves the data of a channel: the native library (C++), MPI, or nothing in a group of one rank."""
