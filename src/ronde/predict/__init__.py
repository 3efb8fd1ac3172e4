"""Batch prediction: a model over a data set, on any number of ranks, each row once and in order."""

from __future__ import annotations

from ronde.predict.output import read_manifest
from ronde.predict.plan import PredictManifest, PredictOptions
from ronde.predict.worker import PredictProgress, predict

__all__ = ["PredictManifest", "PredictOptions", "PredictProgress", "predict", "read_manifest"]
