"""Small things at their historic addresses."""
