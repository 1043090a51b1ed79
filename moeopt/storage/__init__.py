"""Storage of measurements: keys, facts, encoding, databases and the writer."""
