"""Token ids in, token ids out: requests share steps of one model over one paged cache. Knows no text."""
