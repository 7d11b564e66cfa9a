"""One process: where its code is, which modules of the user it imports, and the signals that end it."""
