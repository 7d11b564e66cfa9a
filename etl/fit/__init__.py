"""Statistics learned from the training split: means, vocabularies, class weights."""
