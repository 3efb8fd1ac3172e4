"""Trained models: their export, and predictions over HTTP."""

from ronde.serve.handler import Handler
from ronde.serve.model import OnnxModel, TensorInfo

__all__ = ["Handler", "OnnxModel", "TensorInfo"]
