"""Engines whose config files moeopt writes: what is known of each, and where its kernel lies."""

from moeopt.engines.registry import DEFAULT, every, get, names, of_kernel, register
from moeopt.engines.spec import EngineSpec

__all__ = ["DEFAULT", "EngineSpec", "every", "get", "names", "of_kernel", "register"]
