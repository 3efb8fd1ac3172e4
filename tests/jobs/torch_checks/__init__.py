"""What the distributed optimizer does, check by check, run by all ranks of a job (tests/jobs/test_torch_optimizer.py)."""
