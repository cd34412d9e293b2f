"""The largest numbers that files may state of a model."""

MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20  # hidden and feed-forward size
MAX_HEADS = 1024
MAX_HEAD_DIM = 1024
MAX_VOCABULARY = 1 << 24
MAX_CONTEXT = 1 << 26
MAX_SCALE = 1e6
MAX_TAPS = 16  # of a convolution
MAX_EXPERTS, MAX_USED_EXPERTS = 1024, 64
MAX_STATED = 1 << 16  # of numbers that are checked more closely once all is read
MAX_THETA = 1e15
