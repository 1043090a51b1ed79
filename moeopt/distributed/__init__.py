"""Tunes on several machines: workers over a database server, and Ray."""
