"""The rows of the families that run, in a file for each kind of layers; `architectures` puts them together."""
