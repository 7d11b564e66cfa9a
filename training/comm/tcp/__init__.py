"""Collectives over TCP connections."""
