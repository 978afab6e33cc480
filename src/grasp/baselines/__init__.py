"""Published attribution methods, each faithful to its source, all behind one interface."""
