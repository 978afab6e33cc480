"""Other tools' files, converted to the forms of GRASP. No other package imports this one: readers are entry points.

Comes in: a file, table or record of another tool. Goes out: what `grasp.file_readers` says of each door. A reader
decides by `claims` whether a source is its own. Read `grasp.file_readers` first, then any module with `claims`.
"""
