"""What ranks check in jobs with JAX; tests/jobs/test_jax.py starts them. JAX is not in the environment of the tests, so
nothing here is imported there."""
