"""One process: where its code lies, which modules of the user it imports, and the signals that end it."""
