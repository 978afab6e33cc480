"""What is a part of the corpus worth? Two questions that the predictor answers, and runs where there are any.

In: an artifact and a question. Out: a change for each subset or slice (`predict`), rows in order (`score`).
"""
