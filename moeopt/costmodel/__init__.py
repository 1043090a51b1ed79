"""Cost model of a launch: a formula, and trees fitted on recordings."""
