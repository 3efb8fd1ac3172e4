"""The gradients of one rank, averaged over all: which share a bucket, when it travels, and what a step is."""
