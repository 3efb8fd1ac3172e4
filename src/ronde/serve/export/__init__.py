"""Export of trained models: export_model() makes a model folder; one module for each framework knows how."""

from __future__ import annotations

from ronde.serve.export.exporter import ExportOptions, ExportResult, export_model

__all__ = ["ExportOptions", "ExportResult", "export_model"]
