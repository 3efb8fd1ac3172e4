"""Horovod for TensorFlow. It is not part of ronde-horovod yet."""

raise ImportError("horovod.tensorflow is not part of ronde-horovod yet; horovod.torch is")
