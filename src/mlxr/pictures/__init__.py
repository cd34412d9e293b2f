"""Pictures from strangers: decoded and brought to size in a process that can be stopped.

`decoding.decode` asks, `worker` does it with Pillow.
"""
