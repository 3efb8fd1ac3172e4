"""The backend that moves data with MPI, through mpi4py."""
