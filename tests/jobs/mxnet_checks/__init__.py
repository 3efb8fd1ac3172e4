"""Checks of ronde.mxnet that run on all ranks of a job: collectives in MXNet's engine, training, and faults."""
