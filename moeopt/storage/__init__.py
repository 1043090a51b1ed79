"""How measurements are kept: keys, facts, encoding, databases and the writer."""
