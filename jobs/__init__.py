"""One command-line script for each job; importing one does nothing."""
