"""From rows to a published dataset: staging, shards, quarantine, commit."""
