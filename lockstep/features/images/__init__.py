"""Decodes, resizes and augments pixels."""
