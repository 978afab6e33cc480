"""Pictures as rows: a room beside the road, opened through `grasp.build.modality`.

In: labelled images, an image classifier, trusted images as targets. Out: rows and units of pictures, what the
classifier's head reads of them, and the trusted images that a row bears on. Read `classifier` first; `room` is what the
road asks for.
"""
