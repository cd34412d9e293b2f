"""Our engine against others on one GPU: cases and what is wanted of them, the engines, and the report."""
