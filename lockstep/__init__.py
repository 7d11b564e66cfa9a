"""The rooms that ETL and training share."""
