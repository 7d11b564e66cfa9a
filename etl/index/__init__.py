"""Manifests for files of other programs, which stay as they are."""
