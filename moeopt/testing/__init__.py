"""Parts to test with: devices and workers that fail on purpose."""
