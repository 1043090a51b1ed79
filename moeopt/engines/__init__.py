"""Engines whose config files moeopt writes, and their kernels' sources."""
