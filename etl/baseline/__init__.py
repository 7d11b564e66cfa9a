"""Estimators of pyspark.ml on the rows of a dataset, with which a model is compared."""
