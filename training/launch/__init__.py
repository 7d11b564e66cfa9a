"""Starting ranks: as processes of this host or inside a Spark barrier stage."""
