"""Files and formats: file systems, checksums, manifests, publication."""
