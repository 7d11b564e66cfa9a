"""What ETL, training and prediction share: schema, encoders, fitted statistics, ids."""
