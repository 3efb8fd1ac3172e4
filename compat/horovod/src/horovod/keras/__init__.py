"""Horovod for Keras. It is not part of ronde-horovod yet."""

raise ImportError("horovod.keras is not part of ronde-horovod yet; horovod.torch is")
