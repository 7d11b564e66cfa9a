"""Spark sessions, tasks and Spark's errors in our four parts."""
