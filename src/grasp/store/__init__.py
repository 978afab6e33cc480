"""What is kept on disk: directories of whole parts, each of them a schema of one store.

Comes in: what decides the content, then tables and arrays, a part at a time. Goes out: the same files, each compared
with its checksum, here or behind a URL. Read `directory.py` first; `records.py` has marks and signed summaries,
`locks.py` who may write, `remote.py` what lies elsewhere, `checksummed_parquet.py` tables outside a store.
"""
