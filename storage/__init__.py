"""How bytes lie: file systems, atomic publication, TFRecord, manifests and their verification."""
