"""``python -m moeopt.cli``."""

from moeopt.cli import main

main()
