"""Tokens per second of a real engine without and with tuned files (``python -m benchmarks.serving``)."""
