"""Server logs, and records in lines with a declared schema."""
