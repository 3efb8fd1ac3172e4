"""Trained models: their export, and predictions over HTTP."""
