"""Reference models and the recipe that trains them."""
