"""One interface over local, HDFS and WebHDFS files, with deadlines."""
