"""Hosts, the environment and configuration files, at their historic addresses."""
