"""Our engine against others on one GPU: the cases and their targets, the engines, and the report."""
