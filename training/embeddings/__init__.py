"""Tables of embeddings whose rows are divided over the ranks, with a fixed number of rows or with any ids."""
