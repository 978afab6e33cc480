"""What an artifact says of its own rows, and of itself: suspicious rows, leaked targets, diagnostics."""
