"""What is done after a run: evaluation, export, audit, report."""
