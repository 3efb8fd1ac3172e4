"""What the distributed optimizer does, check by check, run by all ranks of a job. For test_torch_optimizer.py."""
