"""Values that all parts speak of: shapes, configs, spaces, trials, GPUs, provenance."""
