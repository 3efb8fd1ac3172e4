"""The backend whose ranks are threads of one process: the reference for tests, and a job of one rank."""
