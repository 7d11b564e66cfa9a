"""Input files: found, cut into ranges, unpacked, and read line by line."""
