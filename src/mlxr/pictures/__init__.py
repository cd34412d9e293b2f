"""Pictures and sounds from strangers: decoded, and brought to size or cut, in a process that can be stopped.

`decoding.decode` asks, `worker` does it for pictures with Pillow, `sounds` for sounds.
"""
