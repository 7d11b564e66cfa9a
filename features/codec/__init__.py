"""The tf.Example codec at speed: Arrow record batches to framed records and back, by kernels that Numba compiles."""
