"""Horovod for MXNet. It is not part of ronde-horovod yet."""

raise ImportError("horovod.mxnet is not part of ronde-horovod yet; horovod.torch is")
