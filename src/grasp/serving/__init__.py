"""Server of an artifact: a live report, and MCP tools: an optional subpackage that is found by entry points.

Input: an artifact; optionally runs. Output: answers to the commands that read it. Start with `serve.serve`, which is
`grasp.serve`; `commands` adds `grasp serve`.
"""
