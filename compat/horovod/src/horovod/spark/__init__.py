"""Horovod for Spark. It is not part of ronde-horovod yet."""

raise ImportError("horovod.spark is not part of ronde-horovod yet; horovod.torch is")
