"""Nouns shared by all of mlxr: errors, request and event types, settings. Standard library only."""
