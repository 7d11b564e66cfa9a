"""What a dataset declares: fields, encodings, signature, fitted statistics."""
