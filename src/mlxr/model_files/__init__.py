"""The files of a model: found by a path or a name, opened, read, and as they would be written anew as GGUF.

Files of weights and a tokenizer meet here. What runs is made of them in `mlxr.loading`.
"""
