"""What the ranks of tests/jobs/test_keras.py check, on each backend of Keras. A check is a function check_*()."""
