"""Elastic training. It is not part of ronde-horovod yet."""

raise ImportError("horovod.torch.elastic is not part of ronde-horovod yet; run the script without elastic mode")
