"""The driver: carries out one job, inside `ronde run` or ronde.run()."""
