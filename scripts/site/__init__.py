"""The site: README, pages and examples as they stand, and a reference made of docstrings, `--help` and errors."""
