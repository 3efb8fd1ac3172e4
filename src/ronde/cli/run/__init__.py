"""`ronde run`."""
