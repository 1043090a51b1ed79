"""Where times come from: GPUs, recordings, fakes."""
