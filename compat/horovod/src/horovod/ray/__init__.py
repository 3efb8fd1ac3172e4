"""Horovod for Ray. It is not part of ronde-horovod yet."""

raise ImportError("horovod.ray is not part of ronde-horovod yet; horovod.torch is")
