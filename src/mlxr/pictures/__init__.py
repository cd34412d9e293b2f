"""Decoding of untrusted pictures, sounds and documents in processes that can be stopped.

`decoding.Decoder` asks for pictures and sounds: `worker` decodes and resizes pictures with Pillow, `sounds` decodes and
cuts sounds. `documents` reads PDFs, and `fetching` downloads files.
"""
