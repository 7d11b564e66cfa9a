"""Schemas, encoders and codecs: one meaning of a row for ETL and training."""
