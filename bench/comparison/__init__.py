"""The parts of bench/compare.py: the two sides (a process each), the cases, and the report."""
