"""From rows to a published dataset: checks, staging, shards, quarantine, publication."""
