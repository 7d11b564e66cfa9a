"""Descriptions of datasets: statistics of each column, sample pictures, as text and as an HTML page."""
