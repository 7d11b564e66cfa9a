"""Other ways to exchange what ranks learn than one sum of gradients in each step: each file is one published method."""
