"""The parts of bench/compare.py: the two sides (a process each), what is measured, and how results are shown."""
