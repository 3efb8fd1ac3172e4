"""Starting the ranks of a job, on this machine and on other hosts."""
