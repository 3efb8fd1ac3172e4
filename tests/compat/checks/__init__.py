"""What hvd does among processes, check by check; all of them run in one job of two. For test_ranks.py."""
