"""Artifacts of several sources as one artifact: an optional subpackage that is found by entry points.

Input: artifacts with the same model, moments and targets. Output: an artifact. Start with `merge.merge`; `commands`
adds `grasp merge`.
"""
