"""Devices: GPUs, their workers and timing."""
