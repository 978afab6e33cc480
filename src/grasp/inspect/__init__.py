"""What an artifact says of its own rows, and of itself.

In: an artifact, and the model and corpus that it was built from where one of its rows is looked into. Out: results that
print themselves. A verb each: `detect` (suspicious rows; `detection` is its arithmetic), `explain` (the words of a row)
and `check` (are the approximations good enough?).
"""
