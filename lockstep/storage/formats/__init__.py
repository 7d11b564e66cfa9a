"""File formats: TFRecord, gzip blocks, Parquet footers, safetensors."""
