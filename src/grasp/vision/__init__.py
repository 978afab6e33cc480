"""Images as rows, and wrong labels: an optional subpackage that is found by entry points.

Input: labelled images, an image classifier, trusted images as targets. Output: rows and units of images, the inputs of
the classifier's head, explanations by trusted images, and rows that look wrong (`detect`). Start with `reader`, the
entry point of `grasp.readers`; `commands` adds `grasp detect`.
"""
