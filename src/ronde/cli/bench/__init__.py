"""`ronde bench`: how fast ronde is on this machine, measured in turn with gloo and the MPI libraries it finds."""
