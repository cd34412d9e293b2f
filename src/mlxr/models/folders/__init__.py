"""Folders of Hugging Face models, which enter as GGUF files do: a folder is loaded as it is converted."""
