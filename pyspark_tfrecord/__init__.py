"""`spark.read.format("tfrecord")` and `df.write.format("tfrecord")` for Spark 4, without a jar.

Spark looks through the modules on its Python path whose names begin with `pyspark_` and registers their
`DefaultSource`; `register(spark)` does it by hand where Spark's Java process was started without this package on its
path. docs/tfrecord-source.md has the options.
"""

from pyspark_tfrecord.source import DefaultSource, register

__all__ = ["DefaultSource", "register"]
