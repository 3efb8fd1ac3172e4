"""What the ranks print, on its way to the user's terminal and to files. The driver hands it to a Printer."""
