"""How measurements are kept: keys, encoding, databases, the writer, locks and claims."""
