"""What is done after a run: evaluation, prediction, export, audit, report."""
