"""Files and formats: file systems, checksums, manifests, publication. `settings` has every deadline."""
