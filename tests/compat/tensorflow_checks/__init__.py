"""What hvd does for TensorFlow and Keras among processes, check by check; all of them run in one job of two. For
test_tensorflow.py, which has no TensorFlow."""
