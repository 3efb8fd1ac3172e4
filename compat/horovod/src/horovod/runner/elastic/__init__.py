"""Elastic jobs: where hosts come from, and what processes are told about them. The driver is ronde's."""
