"""What ranks check in jobs with TensorFlow; tests/jobs/test_tensorflow.py starts them. TensorFlow is not in the
environment of the tests, so nothing here is imported there."""
