"""``python -m moeopt``."""

from moeopt.cli import main

main()
