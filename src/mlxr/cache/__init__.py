"""The KV cache, whole as `kv_cache`: pages as integers (pager, page_table, prefix, eviction), arrays and files.

The arrays are the arena's (with sizing and memory), the files the store's (store_file, store, store_writer).
"""
