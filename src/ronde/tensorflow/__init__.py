"""Distributed training with TensorFlow."""
from ronde.tensorflow.collectives import *  # temporary
from ronde.tensorflow.graph_errors import find_error
