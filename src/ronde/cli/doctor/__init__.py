"""`ronde doctor`."""
