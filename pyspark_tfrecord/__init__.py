"""`spark.read.format("tfrecord")` and `df.write.format("tfrecord")` for Spark 4, without a jar.

Spark looks through the modules on its Python path whose names begin with `pyspark_` and registers their
`DefaultSource`; `register(spark)` does it by hand where Spark's Java process was started without this package on its
path. docs/reading-elsewhere.md has the options.
"""

import pyspark

from lockstep.storage.errors import ConfigError

if pyspark.__version__.startswith("3."):
    raise ConfigError(
        f'format("tfrecord") needs Spark 4, and this is Spark {pyspark.__version__}',
        got="a Spark without data sources in Python",
        allowed="Spark 4.0 to 4.3",
        next_step="Use Spark 4, or write datasets as Parquet (--format parquet), which any Spark reads.",
    )

from pyspark_tfrecord.source import DefaultSource, register

__all__ = ["DefaultSource", "register"]
