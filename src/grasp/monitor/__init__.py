"""Monitor a running training: loss by source, and effect of sources on targets. Start with `monitor.Monitor`."""
