"""The former name of `etl.petastorm`, for programs and Spark settings that use it."""

from etl.petastorm import enable

__all__ = ["enable"]
