"""Recordings: measured landscapes in files, and a device that replays one."""
