"""Stores: directories of files that are written part by part, verified by checksum, and readable from a URL.

`directory.py` writes and reads a store, `records.py` has completion marks and signed summaries, `locks.py` coordinates
writers, `remote.py` reads and publishes stores at URLs, `contents.py` converts tables and arrays to bytes, and
`checksummed_parquet.py` has single tables with checksums. Start with `directory.Store`.
"""
