"""What is in a dataset: statistics of each column, as text and as a page."""
