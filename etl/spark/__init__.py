"""Work for Spark tasks, settings of a Spark session, and Spark's errors in our four parts."""
