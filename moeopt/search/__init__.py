"""Strategies that pick launch configs."""
