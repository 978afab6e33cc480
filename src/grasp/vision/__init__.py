"""Images as rows: an optional subpackage, imported lazily by `grasp.pipeline.modality`.

Input: labelled images, an image classifier, trusted images as targets. Output: rows and units of images, the inputs of
the classifier's head, and explanations by trusted images. Start with `classifier`; `vision_entry` is the interface that
the build calls.
"""
