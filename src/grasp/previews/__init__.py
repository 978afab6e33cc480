"""What a build would read, before anything is computed: an optional subpackage that is found by entry points.

Input: a corpus, or targets. Output: a table that prints itself. Start with `preview.preview_corpus`; `commands` adds
`grasp corpus` and `grasp targets`.
"""
