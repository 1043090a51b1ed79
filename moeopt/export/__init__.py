"""Files that the engines read."""
