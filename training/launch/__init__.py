"""How ranks are started: on this host, by Spark, or by a user's script."""
