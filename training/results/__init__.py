"""After a run: evaluation, export, audit, report."""
