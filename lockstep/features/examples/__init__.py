"""tf.Example and tf.SequenceExample, plain and compiled."""
