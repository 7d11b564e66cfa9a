"""The code of the ways to exchange other than one sum of gradients in each step: each file is one published method."""
