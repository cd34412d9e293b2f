"""The KV cache; `kv_cache` is its interface.

Pages are integers in `page_table`, `prefix` and `group`, arrays in `arena`, and files in `store` and `store_writer`.
`shapes` says how many pages there are.
"""
