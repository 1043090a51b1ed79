"""How launch configs are picked."""
