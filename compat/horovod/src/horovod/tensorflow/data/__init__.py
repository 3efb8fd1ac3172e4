"""The tf.data service with compute workers: processes of their own that prepare the data of a training."""
