"""The Spark session of a job or a notebook: settings that results depend on, and our code on the executors."""
