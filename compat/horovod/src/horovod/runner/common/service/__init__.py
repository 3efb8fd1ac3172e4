"""Services that the processes of a job talk to."""
