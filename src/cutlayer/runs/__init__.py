"""Runs: rounds, what is measured of them, and the folder that keeps it all. May import everything below `remote`."""
