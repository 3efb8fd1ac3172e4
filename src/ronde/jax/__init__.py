"""What ronde.keras needs of JAX."""
