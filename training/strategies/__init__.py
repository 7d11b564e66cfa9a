"""Other ways to exchange than one sum of gradients in each step: each file is one published method."""
