"""Other ways to exchange what ranks learn, each of a published source: tables of embeddings in shards."""
